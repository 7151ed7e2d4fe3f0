"""Measures the machine's limit for the engine's steps, right after they have run. Called by `turns` and `rounds`.

The limit is the time for two things: each matrix product with its fastest kernel (torch's, oneDNN's with packed
weights, or ours), and one read of the rows' KV cache in its state before the step. Both run again after every slice of
the engine, because the speed of a shared machine changes. Attention's arithmetic, norms, sampling and everything else
count as 0, so no engine reaches the limit.
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
from conveyor_engine.execution.runners.packed import PackedRunner
from conveyor_engine.loop.executor import Executor
from conveyor_engine.tasks.generate.execution.runner import GenerateRunner
from conveyor_engine.wire.step import StepPlan

PASSES, PASSES_SECONDS = 3, 0.1  # the least number and duration of the passes that choose a product's kernel

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Step:
    """The size of the work in a step of the engine."""

    tokens: int  # rows of the layers' products
    outputs: int  # rows of the head's product, and of the last layer's products after its attention
    kv_tokens: int  # tokens of all rows in the cache before the step


class Limit:
    """Records the steps of a runner from now on. `slice` then runs only their matrix products and cache reads."""

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
        """Return the speed of reading memory, and the fastest kernels by "rows x in x out"."""
        return {
            "read_gb_per_second": round(self.kv_bytes / self.kv_seconds / 1e9, 1) if self.kv_bytes else None,
            "kernels": {
                shape: name for products in (*self._layers, *self._outputs) for shape, name in products.chosen.items()
            },
        }

    @torch.inference_mode()
    def slice(self, tokens: int) -> Slice:
        """Return a slice with the limit's time for the engine's steps since the last call.

        tokens: how many tokens these steps have made for each request.
        """
        steps = self._steps.copy()
        self._steps.clear()
        self._prepare(steps)
        processors, started = processor_ticks(), time.perf_counter()
        for step in steps:
            self._run(step)
        seconds = time.perf_counter() - started
        return Slice(tokens, seconds, stolen_share(processors, processor_ticks()))

    def _prepare(self, steps: Sequence[Step]) -> None:
        """Choose kernels and allocate memory, so that this is not part of the measured time."""
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
        """Yield the products of a step with their numbers of rows."""
        yield from ((products, step.tokens) for products in self._layers)
        if step.outputs:
            yield from ((products, step.outputs) for products in self._outputs)


def note_steps(executor: Executor) -> list[Step]:
    """Return a list to which each step that the executor begins is added."""
    steps: list[Step] = []
    begin = executor.begin

    def noting(plan: StepPlan) -> Any:
        steps.append(Step(sum(plan.num_tokens), sum(plan.num_logits), sum(plan.num_computed_tokens)))
        return begin(plan)

    executor.begin = noting  # type: ignore[method-assign]
    return steps


class Products:
    """Matrix products with all layers' weights of one shape, so that the weights come from memory, not from a cache."""

    def __init__(self, linears: Sequence[Any]) -> None:
        weights = [linear.weight for linear in linears]
        self._out, self._in = weights[0].shape
        self._dtype = weights[0].dtype
        self._kernels = {name: [build(weight) for weight in weights] for name, build in builders().items()}
        self._inputs: dict[int, torch.Tensor] = {}
        self._fastest: dict[int, list[Linear]] = {}
        self.chosen: dict[str, str] = {}

    def prepare(self, rows: int) -> None:
        """Choose the fastest kernel for about this number of rows."""
        about = _round_up(rows)
        if about not in self._inputs:
            self._inputs[about] = x = torch.randn(about, self._in, dtype=self._dtype)
            name = min(self._kernels, key=lambda name: shortest(partial(_each, self._kernels[name], x)))
            self._fastest[about] = self._kernels[name]
            self.chosen[f"{about}x{self._in}x{self._out}"] = name
        self._fastest[about][0](self._inputs[about][:rows])  # oneDNN prepares itself for each number of rows

    def run(self, rows: int) -> None:
        about = _round_up(rows)
        _each(self._fastest[about], self._inputs[about][:rows])


class Memory:
    """Reads a number of bytes from memory with the faster of two reductions."""

    def __init__(self) -> None:
        self._data = torch.ones(0)
        self._read = _sum

    def hold(self, num_bytes: int) -> None:
        if num_bytes > self._data.nbytes:
            self._data = torch.ones(2 * -(-num_bytes // 4))  # twice the size, because contexts grow
            self._read = min((_sum, _smallest), key=lambda read: shortest(partial(read, self._data)))

    def read(self, num_bytes: int) -> None:
        if num_bytes:
            self._read(self._data[: num_bytes // 4])


def _round_up(rows: int) -> int:
    """Return the next power of two."""
    return 1 << (rows - 1).bit_length()


def _sum(data: torch.Tensor) -> torch.Tensor:
    return data.sum()


def _smallest(data: torch.Tensor) -> torch.Tensor:
    return data.view(torch.int32).amin()


def builders() -> dict[str, Callable[[torch.Tensor], Linear]]:
    """Return functions that build a product from a matrix, one for each kernel that this machine has."""
    found: dict[str, Callable[[torch.Tensor], Linear]] = {"torch": lambda w: partial(functional.linear, weight=w)}
    if native.why_missing() is None:
        found["native"] = lambda w: NativeLinear(w, None)
    if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["onednn"] = lambda w: OneDnnLinear(w, None)
    return found


def kv_token_bytes(model: PreTrainedModel) -> int:
    """Return the bytes of one token in the KV cache."""
    config = model.config.get_text_config()
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize)


def shortest(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest pass."""
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
    """Return all linear layers in the module."""
    return [part for part in module.modules() if isinstance(part, PackedLinear | nn.Linear)]


def after_last_attention(runner: GenerateRunner | PackedRunner) -> list[Any]:
    """Return those linear layers of the last decoder layer that compute only the tokens with logits."""
    last = runner.last_layer if isinstance(runner, GenerateRunner) else None
    layers = [m for m in runner.model.modules() if isinstance(m, DecoderLayer) and m.self_attn.spec.layer == last]
    return [linear for layer in layers for linear in linears_of(layer) if linear is not layer.self_attn.qkv_proj]


def group_by_shape(linears: Sequence[Any]) -> list[list[Any]]:
    groups: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for linear in linears:
        groups[linear.in_features, linear.out_features].append(linear)
    return list(groups.values())
