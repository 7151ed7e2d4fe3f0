"""Rounds the weights of linear layers to whole numbers of 8 or 4 bits, for the compiled kernels.

Called by `execution.models.quantize`, one module at a time. A `Grid` has the values that a weight can take. It
comes from the checkpoint (`grids`), or from the weights themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from conveyor_engine.execution import native

GROUPS: Final = (128, 64, 32)  # numbers of inputs that share a scale, the best first
_OF_BITS: Final = {8: GROUPS, 4: (32,)}  # for weights that have no scales yet
_PANELS: Final = 16  # rounded at once, which bounds the memory beside the weights
# Of the range of a group's numbers: a smaller one cuts off the largest number and rounds all others finer.
_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values scale * (number - zero), number < 2^bits, of groups of inputs.

    scales: (out, groups), float32 or bfloat16. zeros: int16 (out, groups); None for half of 2^bits.
    """

    bits: int
    scales: Tensor
    zeros: Tensor | None = None

    def round(self, weight: Tensor) -> Tensor:
        """Return the nearest numbers, uint8 (out, in), of weight (out, in)."""
        grouped = weight.float().view(*self.scales.shape, -1)
        scales = self.scales.float()[..., None]
        numbers = torch.where(scales != 0, grouped / scales, 0).round_()
        numbers += 1 << self.bits - 1 if self.zeros is None else self.zeros[..., None]
        return numbers.clamp_(0, (1 << self.bits) - 1).to(torch.uint8).view(weight.shape)

    def read(self, numbers: Tensor) -> Tensor:
        """Return what the numbers (out, in) stand for, float32."""
        grouped = numbers.view(*self.scales.shape, -1).float()
        grouped -= 1 << self.bits - 1 if self.zeros is None else self.zeros[..., None]
        return grouped.mul_(self.scales.float()[..., None]).view(numbers.shape)


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
    """Return the grid of weights one below the other; None if one has none, or another kind of grid."""
    found = [grid for grid in grids if grid is not None]
    kinds = {(grid.bits, grid.scales.shape[1], grid.scales.dtype, grid.zeros is None) for grid in found}
    if len(found) < len(grids) or len(kinds) != 1:
        return None
    zeros = [grid.zeros for grid in found if grid.zeros is not None]
    return Grid(found[0].bits, torch.cat([grid.scales for grid in found]), torch.cat(zeros) if zeros else None)


def quantize(weight: native.PackedWeight, bits: int, grid: Grid | None = None) -> native.PackedIntegers | None:
    """Return a packed weight rounded to whole numbers; None if no size of groups fits.

    grid: the values that the weight has, but for bfloat16's rounding; None if it has others.
    """
    group = find_group(weight.in_features, bits) if grid is None else weight.in_features // grid.scales.shape[1]
    if group not in GROUPS or (grid is not None and len(grid.scales) != weight.out_features):  # a share of the layer
        return None
    scale_dtype = torch.bfloat16 if grid is None else grid.scales.dtype
    shape, has_zeros = (weight.out_features, weight.in_features), grid is not None and grid.zeros is not None
    packed = native.PackedIntegers.allocate(shape, bits, group, scale_dtype, has_zeros)
    for first in range(0, len(weight.data), _PANELS):
        data = weight.data[first : first + _PANELS]
        plain = native.unpack_linear(native.PackedWeight(data, len(data) * native.PANEL, weight.in_features))
        part = choose_grid(plain, bits, group) if grid is None else _rows_of(grid, first * native.PANEL, len(plain))
        numbers = part.round(plain)
        if grid is not None and not torch.equal(part.read(numbers).to(plain.dtype), plain):
            return None
        packed.fill(first, numbers, part.scales, part.zeros)
    return packed


def _rows_of(grid: Grid, first: int, count: int) -> Grid:
    """Return the grid of `count` rows, with scales of 0 behind the last one."""
    scales, zeros = (
        None if each is None else functional.pad(part := each[first : first + count], (0, 0, 0, count - len(part)))
        for each in (grid.scales, grid.zeros)
    )
    assert scales is not None
    return Grid(grid.bits, scales, zeros)
