"""Weights of a linear layer in 4 or 8 bits, as the kernels for GPUs read them. Plain data, without Triton."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

Kind = Literal["int4", "int8", "fp4", "fp8"]
PAIR: Final = 32  # inputs that a kernel multiplies at once, between the two numbers of a byte
SMALL_PAIR: Final = 16  # the same for groups of 16


@dataclass(frozen=True, slots=True)
class Weights:
    """The values scale * (number - zero), or scale * number - minimum, of groups of inputs.

    numbers: (out, in) bytes, each a whole number from -128 on, or the bits of an FP8 E4M3 number. int4 and fp4:
    (out, in / 2), whole numbers from 0 on or the bits of FP4 E2M1 numbers. A byte has the number of an input in its low
    half, and that of the input `pair` behind it in its high half.
    scales: (groups, out), of any floating-point type; int8: whole numbers; uint8: the bits of FP8 E4M3 numbers.
    starts: (groups, out). uint8: the zeros of int4; int8: minima. None: zeros of 8 for int4, of 0 for the others.
    factors: (n, 1 or 2, out), by which scales, and minima, of a part of the inputs are multiplied.
    order: (in,), the input that each column multiplies, if columns are sorted by group. None: column i has input i.
    """

    kind: Kind
    numbers: torch.Tensor
    scales: torch.Tensor
    starts: torch.Tensor | None = None
    factors: torch.Tensor | None = None
    order: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1] * (2 if is_half(self.kind) else 1)

    @property
    def group(self) -> int:
        """Return how many inputs share a scale."""
        return self.in_features // self.scales.shape[0]

    @property
    def pair(self) -> int:
        return _find_pair(self.group)

    @property
    def form(self) -> tuple[object, ...]:
        """Return what weights that can be joined have in common, if their groups fit too."""
        starts, factors = self.starts, self.factors
        return (
            self.kind, self.pair, self.scales.dtype, starts is not None and starts.dtype,
            factors is not None and (factors.dtype, factors.shape[:2]), self.order is None,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        parts = self.numbers, self.scales, self.starts, self.factors, self.order
        return sum(part.nbytes for part in parts if part is not None)

    def change(self, change: Callable[[torch.Tensor], torch.Tensor], numbers: torch.Tensor) -> "Weights":
        """Return weights with other numbers, and scales, starts and factors changed alike."""
        starts, factors = (None if part is None else change(part) for part in (self.starts, self.factors))
        return Weights(self.kind, numbers, change(self.scales), starts, factors, self.order)


def is_half(kind: Kind) -> bool:
    """Return whether a byte has two numbers."""
    return kind in ("int4", "fp4")


def _find_pair(group: int) -> int:
    return SMALL_PAIR if group % PAIR else PAIR


def has_kernels(kind: Kind, columns: int, groups: int) -> bool:
    """Return whether the kernels multiply with rows of so many inputs in so many groups."""
    group = columns // groups
    pair = _find_pair(group)
    if columns % (2 * pair if is_half(kind) else pair) or group % pair or group * groups != columns:
        return False
    # Otherwise, a block of bytes would have the inputs of two groups.
    return not is_half(kind) or group == pair or group % (2 * pair) == 0


def pack_weights(
    kind: Kind,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    starts: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
    order: torch.Tensor | None = None,
    middle: int = 128,
) -> Weights:
    """Return weights in the kernels' order.

    numbers: uint8 (out, in), whole numbers from 0 on or the bits of FP8 or FP4. scales, starts: (out, groups).
    factors: (out, n, 1 or 2). middle: the number of int8 that stands for 0.
    """
    assert has_kernels(kind, numbers.shape[1], scales.shape[1])
    if is_half(kind):
        low, high = numbers.view(len(numbers), -1, 2, _find_pair(numbers.shape[1] // scales.shape[1])).unbind(2)
        numbers = (low | high << 4).flatten(1)
    elif kind == "int8":
        numbers = (numbers - middle).view(torch.int8)
    return Weights(
        kind,
        numbers.contiguous(),
        scales.t().contiguous(),
        None if starts is None else starts.t().contiguous(),
        None if factors is None else factors.permute(1, 2, 0).contiguous(),
        order,
    )


def take_outputs(weights: Weights, count: int) -> Weights:
    """Return the weights of the first outputs."""
    return weights.change(lambda part: part[..., :count].contiguous(), weights.numbers[:count])


def have_one_order(parts: Sequence[Weights]) -> bool:
    """Return whether the columns of all weights have the same inputs."""
    first = parts[0].order
    return all(
        part.order is first or (part.order is not None and first is not None and torch.equal(part.order, first))
        for part in parts
    )


def join_weights(parts: Sequence[Weights]) -> Weights:
    """Return the weights of layers one below the other.

    They have one order, the same form, and the same groups or one group; or else scales in blocks (`has_blocks`).
    """
    if len({part.form for part in parts}) > 1:
        parts = [widen_to_bytes(part) for part in parts]
    groups = max(len(each.scales) for each in parts)
    starts = [each.starts.expand(groups, -1) for each in parts if each.starts is not None]
    factors = [each.factors for each in parts if each.factors is not None]
    return Weights(
        parts[0].kind,
        torch.cat([each.numbers for each in parts]),
        torch.cat([each.scales.expand(groups, -1) for each in parts], dim=1),
        torch.cat(starts, dim=1) if starts else None,
        torch.cat(factors, dim=2) if factors else None,
        parts[0].order,
    )


def has_blocks(weights: Weights) -> bool:
    """Return whether scales are whole numbers with factors, as those of GGUF's K types are."""
    return weights.scales.dtype == torch.int8 and weights.group % SMALL_PAIR == 0


def widen_to_bytes(weights: Weights) -> Weights:
    """Return the same values in 8 bits, with minima and groups of 16: all weights with blocks can have this form."""
    assert has_blocks(weights)
    assert weights.factors is not None
    scales, starts, factors, numbers = weights.scales, weights.starts, weights.factors, weights.numbers
    if is_half(weights.kind):
        blocks = numbers.view(len(numbers), -1, weights.pair)
        numbers = torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1).view(torch.int8)
    if starts is None:
        starts, factors = torch.zeros_like(scales), torch.cat((factors, torch.zeros_like(factors)), dim=1)
    repeats = weights.group // SMALL_PAIR
    scales, starts = (part.repeat_interleave(repeats, 0) for part in (scales, starts))
    return Weights("int8", numbers, scales, starts, factors)
