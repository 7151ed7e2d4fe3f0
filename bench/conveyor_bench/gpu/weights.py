"""The stage `weights` measures products with weights of 4 and 8 bits, beside the same product in 16 bits.

The shapes are the products of a layer of the large model, and the experts of a layer of Qwen3-30B-A3B. A weight's
copies are together larger than the GPU's cache, so that each product reads its weights from memory. `of_bandwidth` is
the share of the device's bandwidth that reading the packed weights reaches. Before the time, each product is compared
with the plain one. Without a GPU, Triton's interpreter runs the kernels.
"""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from conveyor_bench.gpu.device import Ceilings, measure_ceilings, seconds_of
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_bench.gpu.weight_formats import FORMATS, make_weights
from conveyor_engine.execution.kernels.packed_product import restore
from conveyor_engine.execution.models.gpu_experts import GpuExperts
from conveyor_engine.execution.models.gpu_linear import GpuLinear

_CHOICES = 16  # of experts, in turns, so that few tokens read other experts each time


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    ceilings = measure_ceilings(device, dtype, sizes.copied_bytes, sizes.product_width)
    heads = (sizes.groups[0] + 2) * sizes.kv_heads * sizes.head_dim
    shapes = {
        "QKV": (heads, sizes.hidden),
        "gate and up": (2 * sizes.intermediate, sizes.hidden),
        "down": (sizes.hidden, sizes.intermediate),
    }
    for name in sizes.packed_formats or FORMATS:
        for product, shape in shapes.items():
            measure = partial(_measure, results, sizes, ceilings, (product, shape), name)
            _try(results, device, "products of packed weights", measure, product=product, format=name)
        measure = partial(_measure_experts, results, sizes, name)
        _try(results, device, "experts of packed weights", measure, format=name)


def _try(results: Results, device: torch.device, table: str, measure: Callable[[], None], **named: str) -> None:
    try:
        measure()
    except Exception as error:  # the other figures are still worth having
        results.row(table, **named, error=f"{type(error).__name__}: {str(error)[:300]}")
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _measure(
    results: Results, sizes: Sizes, ceilings: Ceilings, product: tuple[str, tuple[int, int]], name: str
) -> None:
    device, dtype, (what, shape) = torch.device(sizes.device), getattr(torch, sizes.dtype), product
    packed = make_weights(name, shape, device, dtype)
    if packed is None:
        return
    copies = max(1, min(64, sizes.uncached_bytes // packed.num_bytes))
    made = (make_weights(name, shape, device, dtype) for _ in range(copies - 1))
    linears = [GpuLinear(each, None, dtype) for each in (packed, *made) if each is not None]
    plain = restore(packed, dtype)
    others = [plain, *(plain.clone() for _ in range(max(1, min(64, sizes.uncached_bytes // plain.nbytes)) - 1))]
    for rows in sizes.product_rows:
        x = torch.randn((rows, shape[1]), device=device, dtype=dtype)
        expected, actual = functional.linear(x, plain), linears[0](x)
        ours = seconds_of([partial(each, x) for each in linears], device, sizes.seconds_each)
        theirs = seconds_of([partial(functional.linear, x, each) for each in others], device, sizes.seconds_each)
        results.row(
            "products of packed weights", product=what, format=name, bits=8 * packed.num_bytes / plain.numel(),
            rows=rows, us=ours * 1e6, us_16_bits=theirs * 1e6, times_faster=theirs / ours,
            of_bandwidth=packed.num_bytes / ceilings.bytes_per_second / ours,
            relative_error=_find_error(actual, expected),
        )  # fmt: skip


def _measure_experts(results: Results, sizes: Sizes, name: str) -> None:
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    count, each, hidden, inner = sizes.experts
    gate_up, down = (
        make_weights(name, shape, device, dtype) for shape in ((count * 2 * inner, hidden), (count * hidden, inner))
    )
    if gate_up is None or down is None:
        return
    ours, theirs = GpuExperts(gate_up, down, count, dtype), _make_plain(sizes, device, dtype)
    theirs.gate_up_proj.data.copy_(restore(gate_up, dtype).view_as(theirs.gate_up_proj))
    theirs.down_proj.data.copy_(restore(down, dtype).view_as(theirs.down_proj))
    choices = _CHOICES if sizes.uncached_bytes else 1
    for tokens in sizes.product_rows:
        x, shares = (torch.randn((tokens, size), device=device, dtype=dtype) for size in (hidden, each))
        chosen = [torch.rand((tokens, count), device=device).argsort(dim=1)[:, :each] for _ in range(choices)]
        with torch.inference_mode():
            error = _find_error(ours(x, chosen[0], shares), theirs(x, chosen[0], shares))
        seconds, plain_seconds = (
            seconds_of([partial(experts, x, some, shares) for some in chosen], device, sizes.seconds_each)
            for experts in (ours, theirs)
        )
        results.row(
            "experts of packed weights", format=name, tokens=tokens, us=seconds * 1e6, us_16_bits=plain_seconds * 1e6,
            times_faster=plain_seconds / seconds, relative_error=error,
        )  # fmt: skip


def _make_plain(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Any:
    """Return transformers' experts, with the code that it chooses for GPUs."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    count, each, hidden, inner = sizes.experts
    config = Qwen3MoeConfig(
        num_experts=count, num_experts_per_tok=each, hidden_size=hidden, moe_intermediate_size=inner
    )
    config._experts_implementation = "grouped_mm"
    return Qwen3MoeExperts(config).to(device=device, dtype=dtype).requires_grad_(False)


def _find_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())
