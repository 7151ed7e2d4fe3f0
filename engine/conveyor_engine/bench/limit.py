"""Measures the machine's limit, in the bench's own run. Called by `command`.

It is the time of each matrix product by its fastest kernel (torch's, oneDNN's over packed weights, or ours), and of
reading the KV cache once for each token. Attention's arithmetic, norms, sampling and everything else count as nothing,
so no engine reaches 1.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from conveyor_engine.bench.slices import Phase
from conveyor_engine.bench.systems import Workload
from conveyor_engine.execution import native
from conveyor_engine.execution.models.packed_linear import NativeLinear, OneDnnLinear, PackedLinear

STEP_TOKENS = 1024  # of prompts, in one step of the engine
PASSES, PASSES_SECONDS = 3, 0.3  # at least, of each product

Linear = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Limit:
    """Seconds of the whole workload by phase, and what they are made of."""

    seconds: Mapping[Phase, float]
    kv_seconds: float  # of the decodes
    read_bytes_per_second: float
    kernels: Mapping[str, str]  # the fastest, by "rows x in x out"


def measure_limit(model: PreTrainedModel, workload: Workload) -> Limit:
    """For a model on the CPU, over the matrices of all its layers: they come from memory, not from a cache."""
    prompt_tokens = workload.requests * workload.input_tokens
    step, rows = min(STEP_TOKENS, prompt_tokens), workload.requests
    kernels: dict[str, str] = {}
    with torch.inference_mode():
        (head,) = fastest([model.get_output_embeddings()], [rows], kernels)
        steps, decodes = zip(*(fastest(group, [step, rows], kernels) for group in _by_shape(model)), strict=True)
        speed = read_bytes_per_second()
    kv_seconds = kv_bytes(model, workload) / speed
    seconds: dict[Phase, float] = {
        "prefill": sum(steps) * prompt_tokens / step + head,
        "decode": (sum(decodes) + head) * (workload.output_tokens - 1) + kv_seconds,
    }
    return Limit(seconds, kv_seconds, speed, kernels)


def fastest(linears: Sequence[Any], rows: Sequence[int], kernels: dict[str, str]) -> list[float]:
    """Seconds of one product with each of these matrices of one shape, by the fastest kernel, for each number of rows.

    Adds the names of the kernels to `kernels`.
    """
    weights = [linear.weight for linear in linears]
    out, width = weights[0].shape
    inputs = [torch.randn(n, width, dtype=weights[0].dtype) for n in rows]
    times: list[dict[float, str]] = [{} for _ in rows]
    for name, build in builders().items():
        built = [build(weight) for weight in weights]
        for n, x in enumerate(inputs):
            times[n][shortest(partial(_each, built, x))] = name
    kernels |= {f"{n}x{width}x{out}": found[min(found)] for n, found in zip(rows, times, strict=True)}
    return [min(found) for found in times]


def builders() -> dict[str, Callable[[torch.Tensor], Linear]]:
    """From a matrix to a product with it, by every kernel of this machine."""
    found: dict[str, Callable[[torch.Tensor], Linear]] = {"torch": lambda w: partial(functional.linear, weight=w)}
    if native.why_missing() is None:
        found["native"] = lambda w: NativeLinear(w, None)
    if torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        found["onednn"] = lambda w: OneDnnLinear(w, None)
    return found


def kv_bytes(model: PreTrainedModel, workload: Workload) -> int:
    """Bytes of the KV cache that all decodes read: each its prompt, the tokens generated before, and itself."""
    config = model.config.get_text_config()
    token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    contexts = sum(workload.input_tokens + step for step in range(1, workload.output_tokens))
    return int(token * contexts * workload.requests)


def read_bytes_per_second() -> float:
    """Memory bandwidth of torch's threads: the better of two reductions over 256 MiB."""
    data = torch.ones(64 * 2**20)
    integers = data.view(torch.int32)
    return data.nbytes / min(shortest(data.sum), shortest(integers.amin))


def shortest(work: Callable[[], object]) -> float:
    """Seconds of the fastest pass."""
    times: list[float] = []
    while len(times) < PASSES or sum(times) < PASSES_SECONDS:
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def _each(linears: Sequence[Linear], x: torch.Tensor) -> None:
    for linear in linears:
        linear(x)


def _layers(model: PreTrainedModel) -> list[Any]:
    head = model.get_output_embeddings()
    return [m for m in model.modules() if isinstance(m, PackedLinear | nn.Linear) and m is not head]


def _by_shape(model: PreTrainedModel) -> list[list[Any]]:
    groups: dict[tuple[int, int], list[Any]] = defaultdict(list)
    for linear in _layers(model):
        groups[linear.in_features, linear.out_features].append(linear)
    return list(groups.values())


def gemm_seconds(model: PreTrainedModel, workload: Workload) -> float:
    """Time of the engine's own linear layers alone for the whole workload: the prompts in steps, then the decodes.

    Over the model's own weights; what is left of the engine's time is everything else.
    """
    head: Any = model.get_output_embeddings()
    linears = _layers(model)

    def one_pass(rows: int) -> float:
        inputs = {n: torch.randn(rows, n, dtype=model.dtype) for n in {m.in_features for m in linears}}
        last = torch.randn(min(rows, workload.requests), head.in_features, dtype=model.dtype)

        def work() -> None:
            for linear in linears:
                linear(inputs[linear.in_features])
            head(last)

        return shortest(work)

    with torch.inference_mode():
        prompt_tokens = workload.requests * workload.input_tokens
        rows = min(STEP_TOKENS, prompt_tokens)
        return one_pass(rows) * prompt_tokens / rows + one_pass(workload.requests) * (workload.output_tokens - 1)
