"""Makes random weights in each format that GPUs keep. Used by the stage `weights`."""

from dataclasses import dataclass
from typing import Literal

import torch

from conveyor_engine.execution.kernels.weights import Kind, Weights, pack_weights

_SUPER = 256  # inputs of a factor of GGUF's K types
_ONE = 0x38  # the bits of 1.0 in FP8 E4M3


@dataclass(frozen=True, slots=True)
class Format:
    """A form of numbers and scales. group: 0 for one scale of a row."""

    kind: Kind
    group: int = 0
    scales: Literal["plain", "zeros", "minima", "blocks", "tensor"] = "plain"


FORMATS = {
    "INT8": Format("int8"),
    "FP8": Format("fp8"),
    "FP8, blocks of 128": Format("fp8", 128),
    "4 bits, groups of 32": Format("int4", 32),
    "4 bits, groups of 128": Format("int4", 128),
    "AWQ": Format("int4", 128, "zeros"),
    "NVFP4": Format("fp4", 16, "tensor"),
    "MXFP4": Format("fp4", 32),
    "Q4_K": Format("int4", 32, "minima"),
    "Q5_K": Format("int8", 32, "minima"),
    "Q6_K": Format("int8", 16, "blocks"),
}


def make_weights(name: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Weights | None:
    """Return random weights (out, in) of a format; None if its groups do not divide the inputs."""
    form, (rows, columns) = FORMATS[name], shape
    group = form.group or columns
    if columns % (_SUPER if form.scales in ("minima", "blocks") else group):
        return None

    def draw(least: int, end: int, *size: int) -> torch.Tensor:
        return torch.randint(least, end, size, dtype=torch.int16, device=device).to(torch.uint8)

    is_block = form.scales in ("minima", "blocks")
    end = 64 if is_block and form.kind == "int8" else {"int4": 16, "fp4": 16, "int8": 256, "fp8": 126}[form.kind]
    numbers, groups, middle = draw(0, end, rows, columns), (rows, columns // group), end // 2
    size = columns**-0.5 / end
    if form.scales in ("plain", "zeros"):
        scales = torch.rand(groups, device=device).add(0.5).mul(size).to(dtype)
        return pack_weights(
            form.kind, numbers, scales, draw(0, 16, *groups) if form.scales == "zeros" else None, middle=middle
        )
    if form.scales == "tensor":
        factors = torch.full((rows, 1, 1), size, device=device)
        return pack_weights(form.kind, numbers, draw(_ONE, _ONE + 16, *groups), None, factors)
    count = 2 if form.scales == "minima" else 1
    factors = torch.full((rows, columns // _SUPER, count), size / 32, device=device, dtype=torch.float16)
    starts = draw(0, 64, *groups).view(torch.int8) if form.scales == "minima" else None
    scales = draw(16, 64, *groups).view(torch.int8)
    return pack_weights(form.kind, numbers, scales, starts, factors, middle=0 if starts is not None else middle)
