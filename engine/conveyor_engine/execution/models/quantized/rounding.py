"""Rounds the weights of linear layers to whole numbers of 8 or 4 bits, for the compiled kernels.

Called by `execution.models.quantize`, one module at a time. A `Grid` has the values that a weight can take. It
comes from the checkpoint (`grids`), or from the weights themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from conveyor_engine.execution import native
from conveyor_engine.execution.native.experts import PackedStack

GROUPS: Final = (128, 64, 32)  # numbers of inputs that share a scale, the best first
SMALLEST_GROUP: Final = 16  # of blocks of GGUF files
_OF_BITS: Final = {8: GROUPS, 4: (32,)}  # for weights that have no scales yet
_FP8_MAX: Final = 448.0
_PANELS: Final = 16  # rounded at once, which bounds the memory beside the weights
# Of the range of a group's numbers: a smaller one cuts off the largest number and rounds all others finer.
_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values scale * (number - zero), or scale * number - minimum, number < 2^bits, of groups of inputs.

    scales: (out, groups), float32, bfloat16 or float16. Or int8: then scales, and minima, are multiplied by `factors`.
    zeros: int16 (out, groups); None for half of 2^bits. minima: int8 (out, groups).
    factors: float16 (out, in / 256, 1 or 2), of scales and of minima. is_float: the numbers are FP8 E4M3, and a uint8
    has the bits of one.
    """

    bits: int
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    is_float: bool = False

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.scales, self.zeros, self.minima, self.factors

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what grids that can be joined have in common."""
        parts = (part if part is None else (part.dtype, part.shape[1:]) for part in self.parts)
        return self.bits, self.is_float, *parts

    def replace(self, change: Callable[[Tensor], Tensor]) -> "Grid":
        """Return a grid with other rows."""
        zeros, minima, factors = (part if part is None else change(part) for part in self.parts[1:])
        return Grid(self.bits, change(self.scales), zeros, minima, factors, self.is_float)

    def take(self, first: int, count: int) -> "Grid":
        """Return the grid of `count` rows."""
        return self.replace(lambda part: part[first : first + count])

    def divide(self, dim: int, rank: int, world_size: int) -> "Grid | None":
        """Return a rank's share of outputs (dim 0) or inputs (dim 1); None if it has no whole groups."""
        if dim == 1 and self.scales.shape[1] == 1:
            return self
        if any(part is not None and part.shape[dim] % world_size for part in self.parts):
            return None
        return self.replace(lambda part: part.chunk(world_size, dim)[rank].contiguous())

    def round(self, weight: Tensor) -> Tensor:
        """Return the nearest numbers, uint8 (out, in), of weight (out, in)."""
        scales, starts = self._widen()
        grouped = weight.float().view(*self.scales.shape, -1)
        if self.is_float:
            numbers = torch.where(scales[..., None] != 0, grouped / scales[..., None], 0).clamp_(-_FP8_MAX, _FP8_MAX)
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8).view(weight.shape)
        if self.minima is not None:
            grouped = grouped + starts[..., None]
        numbers = torch.where(scales[..., None] != 0, grouped / scales[..., None], 0).round_()
        if self.minima is None:
            numbers += starts[..., None]
        return numbers.clamp_(0, (1 << self.bits) - 1).to(torch.uint8).view(weight.shape)

    def read(self, numbers: Tensor) -> Tensor:
        """Return what the numbers (out, in) stand for, float32."""
        scales, starts = self._widen()
        if self.is_float:
            wide = numbers.view(torch.float8_e4m3fn).float().view(*self.scales.shape, -1)
            return wide.mul_(scales[..., None]).view(numbers.shape)
        grouped = numbers.view(*self.scales.shape, -1).float()
        if self.minima is not None:
            grouped = grouped.mul_(scales[..., None]).sub_(starts[..., None])
        else:
            grouped = grouped.sub_(starts[..., None]).mul_(scales[..., None])
        return grouped.view(numbers.shape)

    def _widen(self) -> tuple[Tensor, Tensor]:
        """Return scales and minima, or zeros, of all groups."""
        scales, starts = self.scales.float(), self.minima if self.minima is not None else self.zeros
        starts = torch.tensor([[1 << self.bits - 1]], device=scales.device) if starts is None else starts
        if self.factors is None:
            return scales, starts.float()
        wide = self.factors.float().repeat_interleave(scales.shape[1] // self.factors.shape[1], 1)
        return scales * wide[..., 0], starts.float() if self.minima is None else starts * wide[..., 1]


def find_group(in_features: int, bits: int) -> int | None:
    """Return how many inputs share a scale; None if no size of groups divides the inputs."""
    return next((group for group in _OF_BITS[bits] if in_features % group == 0), None)


def choose_grid(weight: Tensor, bits: int, group: int) -> Grid:
    """Return the grid for weight (out, in), symmetric around 0, with a scale for each row and group of inputs.

    Of 8 bits, the largest number sets the scale. Of 4 bits, the scale is the one with the least squared error among
    several, and the number that is largest by its amount has the end of the range that has one value more.
    """
    grouped = weight.float().view(len(weight), -1, group)
    if bits == 8:
        return Grid(bits, (grouped.abs().amax(dim=2) / 127).to(torch.bfloat16))
    largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))[..., 0]
    best, least = largest / -8, torch.full_like(largest, torch.inf)  # NaN and infinity stay
    for part in _RANGES:
        scales = (largest * (part / -8)).to(torch.bfloat16).float()
        numbers = (grouped * torch.where(scales != 0, 1 / scales, 0)[..., None]).round_().clamp_(-8, 7)
        error = numbers.mul_(scales[..., None]).sub_(grouped).square_().sum(dim=2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return Grid(bits, best.to(torch.bfloat16))


def join_grids(grids: Sequence[Grid | None]) -> Grid | None:
    """Return the grid of weights one below the other; None if one has none, or another kind of grid.

    Blocks of different types are joined in 6 bits: a file of mixed types has one for queries and another for values.
    """
    found = [grid for grid in grids if grid is not None]
    if len(found) < len(grids):
        return None
    if len({grid.kind for grid in found}) > 1:
        if any(grid.factors is None for grid in found):
            return None
        found = [_spread_blocks(grid) for grid in found]
    columns = zip(*(grid.parts for grid in found), strict=True)
    parts = ([part for part in column if part is not None] for column in columns)
    scales, zeros, minima, factors = (torch.cat(part) if part else None for part in parts)
    assert scales is not None
    return Grid(found[0].bits, scales, zeros, minima, factors, found[0].is_float)


def _spread_blocks(grid: Grid) -> Grid:
    """Return the same values in 6 bits, with groups of 16 and minima: all blocks have that form."""
    assert grid.factors is not None
    each = grid.scales.shape[1] // grid.factors.shape[1]
    scales, minima, factors = grid.scales, grid.minima, grid.factors
    if minima is None:
        minima = scales  # scale * (number - 32), which has 6 bits, is scale * number - minimum, exactly in float32
        factors = torch.cat((factors, factors * 32), dim=2)
    scales, minima = (part.repeat_interleave(native.SUPER // SMALLEST_GROUP // each, 1) for part in (scales, minima))
    return Grid(6, scales, None, minima, factors)


def quantize(weight: native.Packed, bits: int, grid: Grid | None = None) -> native.PackedIntegers | None:
    """Return a packed weight rounded to whole numbers; None if no size of groups fits.

    grid: the values that the weight has, but for bfloat16's rounding; None if it has others.
    """
    if grid is not None and grid.is_float:
        return None  # only GPUs have kernels for them
    assert isinstance(weight, native.PackedWeight)
    group = find_group(weight.in_features, bits) if grid is None else weight.in_features // grid.scales.shape[1]
    if group not in (*GROUPS, SMALLEST_GROUP) or (
        grid is not None and len(grid.scales) != weight.out_features
    ):  # a share of the layer
        return None
    scale_dtype = torch.bfloat16 if grid is None else grid.scales.dtype
    packed = native.PackedIntegers.allocate(
        (weight.out_features, weight.in_features), bits, group, scale_dtype,
        has_zeros=grid is not None and grid.zeros is not None,
        has_minima=grid is not None and grid.minima is not None,
    )  # fmt: skip
    for first in range(0, len(weight.data), _PANELS):
        data = weight.data[first : first + _PANELS]
        plain = native.unpack_linear(native.PackedWeight(data, len(data) * native.PANEL, weight.in_features))
        part = choose_grid(plain, bits, group) if grid is None else _rows_of(grid, first * native.PANEL, len(plain))
        numbers = part.round(plain)
        if grid is not None and not torch.equal(part.read(numbers).to(plain.dtype), plain):
            return None
        packed.fill(first, numbers, part.scales, *part.parts[1:])
    return packed


def quantize_stack(stack: PackedStack, bits: int, grids: Sequence[Grid] | None = None) -> PackedStack | None:
    """Return the matrices of experts rounded; None if one cannot be, or is not like the others."""
    if grids is not None and len({grid.kind for grid in grids}) > 1:
        return None
    rounded: PackedStack | None = None
    for number in range(len(stack)):
        matrix = quantize(stack[number], bits, grids[number] if grids else None)
        if matrix is None:
            return None
        rounded = rounded or PackedStack.allocate(matrix, len(stack))
        rounded.data[number] = matrix.data
    return rounded


def _rows_of(grid: Grid, first: int, count: int) -> Grid:
    """Return the grid of `count` rows, with scales of 0 behind the last one."""

    def take(part: Tensor) -> Tensor:
        rows = part[first : first + count]
        return torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))

    return grid.replace(take)
