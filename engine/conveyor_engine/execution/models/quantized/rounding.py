"""Rounds the weights of linear layers to whole numbers of 8 or 4 bits, for the compiled kernels.

Called by `execution.models.quantize`, one module at a time. A `Grid` has the values that a weight can take.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from conveyor_engine.execution import native

_GROUPS: Final = {8: (128, 64, 32), 4: (32,)}  # numbers of inputs that share a scale, the best first
_PANELS: Final = 64  # rounded at once, which bounds the memory beside the weights
# Of the range of a group's numbers: a smaller one cuts off the largest number and rounds all others finer.
_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values scale * (number - half of 2^bits), number < 2^bits, of groups of inputs. scales: (out, groups)."""

    bits: int
    scales: Tensor

    def round(self, weight: Tensor) -> Tensor:
        """Return the nearest numbers, uint8 (out, in), of weight (out, in)."""
        grouped = weight.float().view(*self.scales.shape, -1)
        scales = self.scales.float()[..., None]
        numbers = torch.where(scales != 0, grouped / scales, 0).round_()
        numbers += 1 << self.bits - 1
        return numbers.clamp_(0, (1 << self.bits) - 1).to(torch.uint8).view(weight.shape)


def find_group(in_features: int, bits: int) -> int | None:
    """Return how many inputs share a scale; None if no size of groups divides the inputs."""
    return next((group for group in _GROUPS[bits] if in_features % group == 0), None)


def choose_grid(weight: Tensor, bits: int, group: int) -> Grid:
    """Return the grid for weight (out, in), symmetric around 0, with a scale for each row and group of inputs.

    Of 8 bits, the largest number sets the scale. Of 4 bits, the scale is the one with the least squared error among
    several, and the number that is largest by its amount has the end of the range that has one value more.
    """
    grouped = weight.float().view(len(weight), -1, group)
    if bits == 8:
        return Grid(bits, (grouped.abs().amax(dim=2) / 127).to(torch.bfloat16))
    largest = grouped.gather(2, grouped.abs().argmax(dim=2, keepdim=True))[..., 0]
    best, least = torch.zeros_like(largest), torch.full_like(largest, torch.inf)
    for part in _RANGES:
        scales = (largest * (part / -8)).to(torch.bfloat16).float()
        numbers = torch.where(scales[..., None] != 0, grouped / scales[..., None], 0).round_().clamp_(-8, 7)
        error = (numbers * scales[..., None] - grouped).square().sum(dim=2)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    return Grid(bits, best.to(torch.bfloat16))


def quantize(weight: native.PackedWeight, bits: int) -> native.PackedIntegers | None:
    """Return a packed weight rounded to whole numbers; None if no size of groups fits."""
    group = find_group(weight.in_features, bits)
    if group is None:
        return None
    packed = native.PackedIntegers.allocate((weight.out_features, weight.in_features), bits, group, torch.bfloat16)
    for first in range(0, len(weight.data), _PANELS):
        data = weight.data[first : first + _PANELS]
        plain = native.unpack_linear(native.PackedWeight(data, len(data) * native.PANEL, weight.in_features))
        grid = choose_grid(plain, bits, group)
        packed.fill(first, grid.round(plain), grid.scales, None)
    return packed
