"""Packs whole numbers of 8 bits or fewer for the compiled kernels, those of the checkpoint or those of rounded weights.

Called by modules of our own, one at a time. A `Grid` has the values that a weight can take. It comes from the
checkpoint (`grids`), or from the weights themselves.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from conveyor_engine.execution import native
from conveyor_engine.execution.models.quantized.numbers import look_up_fp4
from conveyor_engine.execution.native.experts import PackedStack

GROUPS: Final = (128, 64, 32)  # numbers of inputs that share a scale, the best first
SMALLEST_GROUP: Final = 16  # of blocks of GGUF files
_OF_BITS: Final = {8: GROUPS, 4: (32,)}  # for weights that have no scales yet
_PANELS: Final = 16  # packed at once, which bounds the memory beside the weights
Rows = Callable[[int, int], Tensor]  # from the first row and their number: uint8 (rows, in)
# Of the range of a group's numbers: a smaller one cuts off the largest number and rounds all others finer.
_RANGES: Final = (1.0, 0.95, 0.9, 0.85, 0.8)


@dataclass(frozen=True, slots=True)
class Grid:
    """The values scale * (number - zero), or scale * number - minimum, number < 2^bits, of groups of inputs.

    scales: (out, groups), float32, bfloat16, float16 or FP8 E4M3, or int8. The latter two are multiplied by `factors`,
    and so are minima. zeros: int16 (out, groups); None for half of 2^bits. minima: int8 (out, groups).
    factors: of scales and of minima, float16 (out, in / 256, 1 or 2), or float32 (out, groups, 1) for scales in FP8.
    is_float: the numbers are FP8 E4M3 or FP4 E2M1, and a uint8 has the bits of one. numbers: reads those of the
    checkpoint. order: (in,), the input of each column, if columns are sorted by group.
    """

    bits: int
    scales: Tensor
    zeros: Tensor | None = None
    minima: Tensor | None = None
    factors: Tensor | None = None
    is_float: bool = False
    numbers: Rows | None = None
    order: Tensor | None = None

    def with_parts(self, parts: Iterable[Tensor | None], numbers: Rows | None) -> "Grid":
        """Return a grid of the same kind with other `parts`."""
        scales, zeros, minima, factors = parts
        assert scales is not None
        return Grid(self.bits, scales, zeros, minima, factors, self.is_float, numbers, self.order)

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.scales, self.zeros, self.minima, self.factors

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what grids that can be joined have in common."""
        parts = (part if part is None else (part.dtype, part.shape[1:]) for part in self.parts)
        order = None if self.order is None else tuple(self.order.tolist())
        return self.bits, self.is_float, order, *parts

    @property
    def is_finite(self) -> bool:
        """Return whether no scale is infinite or NaN."""
        return all(bool(torch.isfinite(part.float()).all()) for part in (self.scales, self.factors) if part is not None)

    @property
    def middle(self) -> int:
        """Return the number that stands for 0, if there are neither zeros nor minima; 0 with minima."""
        return 0 if self.minima is not None else 1 << self.bits - 1

    def find_group(self, columns: int) -> int:
        """Return how many inputs of a row of so many share a scale."""
        return columns // self.scales.shape[1]

    def replace(self, change: Callable[[Tensor], Tensor], numbers: Rows | None = None) -> "Grid":
        """Return a grid with other rows. numbers: reads theirs."""
        return self.with_parts((part if part is None else change(part) for part in self.parts), numbers)

    def take(self, first: int, count: int) -> "Grid":
        """Return the grid of `count` rows, with scales of 0 behind the last one."""

        def take(part: Tensor) -> Tensor:
            rows = part[first : first + count]
            return torch.cat((rows, rows.new_zeros(count - len(rows), *rows.shape[1:])))

        read, numbers = self.numbers, None
        if read is not None:
            numbers = lambda begin, number: read(first + begin, min(number, count - begin))  # noqa: E731
        return self.replace(take, numbers)

    def read_all(self) -> Tensor:
        """Return all numbers of the checkpoint, uint8 (out, in)."""
        assert self.numbers is not None
        step = _PANELS * native.PANEL
        return torch.cat([self.numbers(first, step) for first in range(0, len(self.scales), step)])

    def round(self, weight: Tensor) -> Tensor:
        """Return the nearest numbers, uint8 (out, in), of weight (out, in). They are whole: no weight becomes FP8."""
        assert not self.is_float
        scales, starts = self._widen()
        grouped = weight.float().view(*self.scales.shape, -1)
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
            plain = numbers.view(torch.float8_e4m3fn).float() if self.bits == 8 else look_up_fp4(numbers)
            return plain.view(*self.scales.shape, -1).mul_(scales[..., None]).view(numbers.shape)
        grouped = numbers.view(*self.scales.shape, -1).float()
        if self.minima is not None:
            grouped = grouped.mul_(scales[..., None]).sub_(starts[..., None])
        else:
            grouped = grouped.sub_(starts[..., None]).mul_(scales[..., None])
        return grouped.view(numbers.shape)

    def _widen(self) -> tuple[Tensor, Tensor]:
        """Return scales and minima, or zeros, of all groups."""
        scales, starts = self.scales.float(), self.minima if self.minima is not None else self.zeros
        starts = torch.tensor([[self.middle]], device=scales.device) if starts is None else starts
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


def widen_to_6_bits(grid: Grid) -> Grid:
    """Return the same values in 6 bits, with groups of 16 and minima: all K types of GGUF have that form."""
    assert grid.factors is not None
    each = grid.scales.shape[1] // grid.factors.shape[1]
    scales, minima, factors = grid.scales, grid.minima, grid.factors
    if minima is None:
        minima = scales  # scale * (number - 32), which has 6 bits, is scale * number - minimum, exactly in float32
        factors = torch.cat((factors, factors * 32), dim=2)
    scales, minima = (part.repeat_interleave(native.SUPER // SMALLEST_GROUP // each, 1) for part in (scales, minima))
    return Grid(6, scales, None, minima, factors, numbers=grid.numbers)


def quantize(weight: native.Packed, bits: int) -> native.PackedIntegers | None:
    """Return a packed weight rounded to whole numbers; None if no size of groups fits."""
    assert isinstance(weight, native.PackedWeight)
    group = find_group(weight.in_features, bits)
    if group is None:
        return None
    packed = native.PackedIntegers.allocate((weight.out_features, weight.in_features), bits, group, torch.bfloat16)
    for first in range(0, len(weight.data), _PANELS):
        data = weight.data[first : first + _PANELS]
        plain = native.unpack_linear(native.PackedWeight(data, len(data) * native.PANEL, weight.in_features))
        part = choose_grid(plain, bits, group)
        packed.fill(first, part.round(plain), part.scales, *part.parts[1:])
    return packed


def pack_grid(grid: Grid, columns: int) -> native.PackedIntegers | None:
    """Return the numbers of the checkpoint for the kernels; None if they have no numbers or groups like these."""
    assert not grid.is_float
    rows, group = len(grid.scales), grid.find_group(columns)
    if grid.order is not None or group not in (*GROUPS, SMALLEST_GROUP):
        return None
    packed = native.PackedIntegers.allocate(
        (rows, columns), grid.bits, group, grid.scales.dtype,
        has_zeros=grid.zeros is not None, has_minima=grid.minima is not None,
    )  # fmt: skip
    step = _PANELS * native.PANEL
    for first in range(0, rows, step):
        part = grid.take(first, min(step, len(packed.data) * native.PANEL - first))
        assert part.numbers is not None
        numbers = part.numbers(0, len(part.scales))
        padding = len(part.scales) - len(numbers)
        packed.fill(first // native.PANEL, functional.pad(numbers, (0, 0, 0, padding)), part.scales, *part.parts[1:])
    return packed


def pack_grids(grid: Grid, columns: int, count: int) -> PackedStack | None:
    """Return the matrices of `count` experts, one below the other in the grid."""
    stack, rows = None, len(grid.scales) // count
    for number in range(count):
        matrix = pack_grid(grid.take(number * rows, rows), columns)
        if matrix is None:
            return None
        stack = stack or PackedStack.allocate(matrix, count)
        stack.data[number] = matrix.data
    return stack


def quantize_stack(stack: PackedStack, bits: int) -> PackedStack | None:
    """Return the matrices of experts rounded; None if no size of groups fits."""
    rounded: PackedStack | None = None
    for number in range(len(stack)):
        matrix = quantize(stack[number], bits)
        if matrix is None:
            return None
        rounded = rounded or PackedStack.allocate(matrix, len(stack))
        rounded.data[number] = matrix.data
    return rounded
