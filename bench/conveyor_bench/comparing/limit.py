"""The machine's limit for the steps that the engine has made, measured right after them. Called by `turns`, `rounds`.

It is the time of each matrix product by its fastest kernel (torch's, oneDNN's over packed weights, or ours), and of
reading what the KV cache holds before the step once for each row. Both are run anew beside every slice of the engine,
since a shared machine's speed changes. Attention's arithmetic, norms, sampling and everything else count as nothing, so
no engine reaches 1.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from conveyor_bench.comparing.slices import Slice
from conveyor_bench.comparing.turns import processor_ticks, stolen_share
from conveyor_engine.execution import native
from conveyor_engine.execution.models.layers import DecoderLayer
from conveyor_engine.execution.models.packed_linear import NativeLinear, OneDnnLinear, PackedLinear
from conveyor_engine.execution.runners.generate import GenerateRunner
from conveyor_engine.execution.runners.packed import PackedRunner
from conveyor_engine.loop.executor import Executor
from conveyor_engine.wire.step import StepPlan

PASSES, PASSES_SECONDS = 3, 0.1  # at least, of each product, to choose its kernel

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """What the engine computes in one step."""

    tokens: int  # rows of the layers' products
    outputs: int  # rows of the head's product, and of the last layer's after its attention
    kv_tokens: int  # in the cache before it, of all rows


class Limit:
    """Notes the steps of a runner from now on, and does their products and reads, and nothing else."""

    def __init__(self, runner: Executor) -> None:
        assert isinstance(runner, GenerateRunner | PackedRunner), "both have a model"
        self.kv_seconds = self.kv_bytes = 0.0
        self._steps = note_steps(runner)
        head, few = runner.model.get_output_embeddings(), after_last_attention(runner)
        others = [linear for linear in linears_of(runner.model) if linear is not head and linear not in few]
        self._layers = [Products(group) for group in group_by_shape(others)]
        self._outputs = [Products(group) for group in (*group_by_shape(few), *([] if head is None else [[head]]))]
        self._token_bytes = 0 if head is None else kv_token_bytes(runner.model)
        self._memory = Memory()

    def describe(self) -> dict[str, Any]:
        """How memory was read, and the fastest kernels by "rows x in x out"."""
        return {
            "read_gb_per_second": round(self.kv_bytes / self.kv_seconds / 1e9, 1) if self.kv_bytes else None,
            "kernels": {
                shape: name for products in (*self._layers, *self._outputs) for shape, name in products.chosen.items()
            },
        }

    @torch.inference_mode()
    def slice(self, tokens: int) -> Slice:
        """Its own time for the steps since the last call, which made so many `tokens`."""
        steps = self._steps.copy()
        self._steps.clear()
        self._prepare(steps)
        processors, started = processor_ticks(), time.perf_counter()
        for step in steps:
            self._run(step)
        seconds = time.perf_counter() - started
        return Slice(tokens, seconds, stolen_share(processors, processor_ticks()))

    def _prepare(self, steps: Sequence[Step]) -> None:
        """Does once what would else be done within the time: kernels are chosen, memory is there."""
        for step in steps:
            for products, rows in self._products(step):
                products.prepare(rows)
        self._memory.hold(max((step.kv_tokens for step in steps), default=0) * self._token_bytes)

    def _run(self, step: Step) -> None:
        for products, rows in self._products(step):
            products.run(rows)
        started, num_bytes = time.perf_counter(), step.kv_tokens * self._token_bytes
        self._memory.read(num_bytes)
        self.kv_seconds += time.perf_counter() - started
        self.kv_bytes += num_bytes

    def _products(self, step: Step) -> Iterator[tuple["Products", int]]:
        """With their rows."""
        yield from ((products, step.tokens) for products in self._layers)
        if step.outputs:
            yield from ((products, step.outputs) for products in self._outputs)


def note_steps(executor: Executor) -> list[Step]:
    """To which each step that the executor begins is added."""
    steps: list[Step] = []
    begin = executor.begin

    def noting(plan: StepPlan) -> Any:
        steps.append(Step(sum(plan.num_tokens), sum(plan.num_logits), sum(plan.num_computed_tokens)))
        return begin(plan)

    executor.begin = noting  # type: ignore[method-assign]
    return steps


class Products:
    """Products with matrices of one shape, of all layers: they come from memory, not from a cache."""

    def __init__(self, linears: Sequence[Any]) -> None:
        weights = [linear.weight for linear in linears]
        self._out, self._in = weights[0].shape
        self._dtype = weights[0].dtype
        self._kernels = {name: [build(weight) for weight in weights] for name, build in builders().items()}
        self._inputs: dict[int, torch.Tensor] = {}
        self._fastest: dict[int, list[Linear]] = {}
        self.chosen: dict[str, str] = {}

    def prepare(self, rows: int) -> None:
        """Chooses the fastest kernel for about so many rows."""
        about = _round_up(rows)
        if about not in self._inputs:
            self._inputs[about] = x = torch.randn(about, self._in, dtype=self._dtype)
            name = min(self._kernels, key=lambda name: shortest(partial(_each, self._kernels[name], x)))
            self._fastest[about] = self._kernels[name]
            self.chosen[f"{about}x{self._in}x{self._out}"] = name
        self._fastest[about][0](self._inputs[about][:rows])  # oneDNN makes something for every number of rows

    def run(self, rows: int) -> None:
        about = _round_up(rows)
        _each(self._fastest[about], self._inputs[about][:rows])


class Memory:
    """Reads as much as is asked, by the better of two reductions."""

    def __init__(self) -> None:
        self._data = torch.ones(0)
        self._read = _sum

    def hold(self, num_bytes: int) -> None:
        if num_bytes > self._data.nbytes:
            self._data = torch.ones(2 * -(-num_bytes // 4))  # contexts grow
            self._read = min((_sum, _smallest), key=lambda read: shortest(partial(read, self._data)))

    def read(self, num_bytes: int) -> None:
        if num_bytes:
            self._read(self._data[: num_bytes // 4])


def _round_up(rows: int) -> int:
    """To a power of two."""
    return 1 << (rows - 1).bit_length()


def _sum(data: torch.Tensor) -> torch.Tensor:
    return data.sum()


def _smallest(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int32).amin()


def builders() -> dict[str, Callable[[torch.Tensor], Linear]]:
    """From a matrix to a product with it, by every kernel of this machine."""
    found: dict[str, Callable[[torch.Tensor], Linear]] = {"torch": lambda w: partial(functional.linear, weight=w)}
    if native.why_missing() is None:
        found["native"] = lambda w: NativeLinear(w, None)
    if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["onednn"] = lambda w: OneDnnLinear(w, None)
    return found


def kv_token_bytes(model: PreTrainedModel) -> int:
    """Of one token in the KV cache."""
    config = model.config.get_text_config()
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


def shortest(work: Callable[[], object]) -> float:
    """Seconds of the fastest pass."""
    fastest, total, passes = math.inf, 0.0, 0
    while passes < PASSES or total < PASSES_SECONDS:
        started = time.perf_counter()
        work()
        taken = time.perf_counter() - started
        fastest, total, passes = min(fastest, taken), total + taken, passes + 1
    return fastest


def _each(linears: Sequence[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x)


def linears_of(module: nn.Module) -> list[Any]:
    """All linear layers in it."""
    return [part for part in module.modules() if isinstance(part, PackedLinear | nn.Linear)]


def after_last_attention(runner: GenerateRunner | PackedRunner) -> list[Any]:
    """The last layer's linears that compute no more than the tokens that get logits."""
    last = runner.last_layer if isinstance(runner, GenerateRunner) else None
    layers = [m for m in runner.model.modules() if isinstance(m, DecoderLayer) and m.self_attn.spec.layer == last]
    return [linear for layer in layers for linear in linears_of(layer) if linear is not layer.self_attn.qkv_proj]


def group_by_shape(linears: Sequence[Any]) -> list[list[Any]]:
    groups: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for linear in linears:
        groups[linear.in_features, linear.out_features].append(linear)
    return list(groups.values())
