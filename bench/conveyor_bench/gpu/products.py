"""The stage `products` measures matrix products by their number of rows: torch's, our kernel for few rows, and FP8."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch.nn import functional

from conveyor_bench.comparing.shapes import SHAPES
from conveyor_bench.gpu.device import Ceilings, Work, measure_ceilings, seconds_of
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_engine.execution.kernels.few_rows import MOST_ROWS, multiply_rows

_E4M3 = torch.float8_e4m3fn
_SECONDS_EACH = 0.05
_MOST_COPIES = 16


def run(results: Results, sizes: Sizes) -> None:
    """Run the stage."""
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    ceilings = measure_ceilings(device, dtype, sizes.copied_bytes, sizes.product_width)
    for shape in dict.fromkeys((sizes.small, sizes.large)):
        for name, (size, columns) in _products(SHAPES[shape]):
            copies = min(_MOST_COPIES, max(1, sizes.uncached_bytes // (size * columns * dtype.itemsize)))
            weights = [torch.randn(size, columns, device=device, dtype=dtype) for _ in range(copies)]
            for rows in sizes.product_rows:
                x = torch.randn(rows, columns, device=device, dtype=dtype)
                for who, calls in _ways(x, weights):
                    figures = _measure(calls, x, weights[0], ceilings, sizes)
                    results.row("products", shape=shape, product=name, rows=rows, who=who, **figures)


def _products(shape: dict[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Return a model's products: their names, and their outputs and inputs."""
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads = shape["num_attention_heads"]
    yield "qkv", ((heads + 2 * shape["num_key_value_heads"]) * dim, hidden)
    yield "o", (hidden, heads * dim)
    yield "gate up", (2 * inner, hidden)
    yield "down", (hidden, inner)
    yield "head", (shape["vocab_size"], hidden)


def _ways(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> Iterator[tuple[str, list[Work]]]:
    yield "torch", [lambda w=w: functional.linear(x, w) for w in weights]  # type: ignore[misc]
    if len(x) <= MOST_ROWS:
        yield "few rows", [lambda w=w: multiply_rows(x, w) for w in weights]  # type: ignore[misc]
    if x.is_cuda and torch.cuda.get_device_capability(x.device) < (8, 9):
        return
    inputs, scales = _rounded(x)
    rounded = [_rounded(weight) for weight in weights]
    yield (
        "torch in FP8",
        [
            lambda w=w, s=s: torch._scaled_mm(  # type: ignore[misc]
                inputs, w.t(), scale_a=scales, scale_b=s.t(), out_dtype=torch.bfloat16
            )
            for w, s in rounded
        ],
    )


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 numbers, and a scale for each row."""
    scales = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 448
    return (x.float() / scales).to(_E4M3), scales


def _measure(
    calls: Sequence[Callable[[], object]], x: torch.Tensor, weight: torch.Tensor, ceilings: Ceilings, sizes: Sizes
) -> dict[str, object]:
    """Return the microseconds, and the share of the limit of a product in the stage's type."""
    limit = max(weight.nbytes / ceilings.bytes_per_second, 2 * len(x) * weight.numel() / ceilings.flops)
    try:
        seconds = seconds_of(calls, x.device, min(_SECONDS_EACH, sizes.seconds_each))
    except RuntimeError as error:  # a product that this device or this version of torch does not have
        return {"reason": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"us": 1e6 * seconds, "of_limit": limit / seconds}
