"""The stage `weights` measures products with weights of 4 and 8 bits, beside the same product in 16 bits.

The shapes are the four products of a layer of the large model. A weight's copies are together larger than the GPU's
cache, so that each product reads its weights from memory. `of_bandwidth` is the share of the device's bandwidth that
reading the packed weights reaches. Before the time, each product is compared with the plain one. Without a GPU,
Triton's interpreter runs the kernels.
"""

import gc
from functools import partial

import torch
from torch.nn import functional

from conveyor_bench.gpu.device import Ceilings, measure_ceilings, seconds_of
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.sizes import Sizes
from conveyor_engine.execution.kernels.packed_product import restore
from conveyor_engine.execution.kernels.weights import Kind, Weights, pack_weights
from conveyor_engine.execution.models.gpu_linear import GpuLinear

_FORMATS: tuple[tuple[Kind, int], ...] = (("int4", 32), ("int4", 128), ("int8", 0), ("fp8", 0), ("fp8", 128))


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
    for name, shape in shapes.items():
        for kind, group in _FORMATS:
            group = group or shape[1]
            if shape[1] % group:
                continue
            try:
                _measure(results, sizes, ceilings, (name, shape), (kind, group))
            except Exception as error:  # the other figures are still worth having
                what = f"{type(error).__name__}: {str(error)[:300]}"
                results.row("products of packed weights", product=name, kind=kind, group=group, error=what)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _measure(
    results: Results, sizes: Sizes, ceilings: Ceilings, product: tuple[str, tuple[int, int]], form: tuple[Kind, int]
) -> None:
    device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
    (name, shape), (kind, group) = product, form
    packed = _make(kind, shape, group, device, dtype)
    copies = max(1, min(64, sizes.uncached_bytes // packed.num_bytes))
    linears = [GpuLinear(packed, None, dtype)]
    linears += [GpuLinear(_make(kind, shape, group, device, dtype), None, dtype) for _ in range(copies - 1)]
    plain = restore(packed, dtype)
    others = [plain, *(plain.clone() for _ in range(max(1, min(64, sizes.uncached_bytes // plain.nbytes)) - 1))]
    for rows in sizes.product_rows:
        x = torch.randn((rows, shape[1]), device=device, dtype=dtype)
        expected, actual = functional.linear(x, plain).float(), linears[0](x).float()
        ours = seconds_of([partial(each, x) for each in linears], device, sizes.seconds_each)
        theirs = seconds_of([partial(functional.linear, x, each) for each in others], device, sizes.seconds_each)
        results.row(
            "products of packed weights", product=name, kind=kind, group=group, rows=rows, us=ours * 1e6,
            us_16_bits=theirs * 1e6, times_faster=theirs / ours,
            of_bandwidth=packed.num_bytes / ceilings.bytes_per_second / ours,
            relative_error=float((actual - expected).norm() / expected.norm()),
        )  # fmt: skip


def _make(kind: Kind, shape: tuple[int, int], group: int, device: torch.device, dtype: torch.dtype) -> Weights:
    """Return random weights. The numbers of FP8 have no sign and no NaN."""
    largest = {"int4": 16, "int8": 256, "fp8": 126}[kind]
    numbers = torch.randint(0, largest, shape, dtype=torch.uint8, device=device)
    scales = torch.rand((shape[0], shape[1] // group), device=device).add(0.5).mul(shape[1] ** -0.5 / largest).to(dtype)
    return pack_weights(kind, numbers, scales)
