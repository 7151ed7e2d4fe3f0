"""Weights of a linear layer in 4 or 8 bits, as the kernels for GPUs read them. Plain data, without Triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

Kind = Literal["int4", "int8", "fp8"]
PAIR: Final = 32  # inputs between the two numbers of a byte


@dataclass(frozen=True, slots=True)
class Weights:
    """The values scale * (number - zero) of groups of inputs.

    numbers: (out, in) bytes, each a whole number from -128 on, or the bits of an FP8 E4M3 number. int4: (out, in / 2).
    A byte has the number of an input in its low half, and that of the input PAIR behind it in its high half.
    scales: (groups, out), of any floating-point type. zeros: uint8 (groups, out), of int4; None: 8.
    """

    kind: Kind
    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None

    @property
    def out_features(self) -> int:
        return self.numbers.shape[0]

    @property
    def in_features(self) -> int:
        return self.numbers.shape[1] * (2 if self.kind == "int4" else 1)

    @property
    def group(self) -> int:
        """Return how many inputs share a scale."""
        return self.in_features // self.scales.shape[0]

    @property
    def num_bytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes + (0 if self.zeros is None else self.zeros.nbytes)


def has_kernels(kind: Kind, columns: int, groups: int) -> bool:
    """Return whether the kernels multiply with rows of so many inputs in so many groups."""
    group = columns // groups
    if columns % (2 * PAIR if kind == "int4" else PAIR) or group % PAIR or group * groups != columns:
        return False
    # Otherwise, a block of bytes would have the inputs of two groups.
    return kind != "int4" or group == PAIR or group % (2 * PAIR) == 0


def pack_weights(kind: Kind, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None) -> Weights:
    """Return weights in the kernels' order.

    numbers: uint8 (out, in), whole numbers from 0 on or the bits of FP8. scales: (out, groups). zeros: (out, groups).
    """
    assert has_kernels(kind, numbers.shape[1], scales.shape[1])
    if kind == "int4":
        low, high = numbers.view(len(numbers), -1, 2, PAIR).unbind(2)
        numbers = (low | high << 4).flatten(1)
    elif kind == "int8":
        numbers = (numbers ^ 128).view(torch.int8)
    of_groups = None if zeros is None else zeros.to(torch.uint8).t().contiguous()
    return Weights(kind, numbers.contiguous(), scales.t().contiguous(), of_groups)


def take_outputs(weights: Weights, count: int) -> Weights:
    """Return the weights of the first outputs."""
    scales, zeros = (None if of is None else of[:, :count].contiguous() for of in (weights.scales, weights.zeros))
    assert scales is not None
    return Weights(weights.kind, weights.numbers[:count], scales, zeros)


def join_weights(parts: Sequence[Weights]) -> Weights:
    """Return the weights of layers one below the other, which have the same kind, and the same groups or one group."""
    groups = max(len(each.scales) for each in parts)
    zeros = [each.zeros.expand(groups, -1) for each in parts if each.zeros is not None]
    return Weights(
        parts[0].kind,
        torch.cat([each.numbers for each in parts]),
        torch.cat([each.scales.expand(groups, -1) for each in parts], dim=1),
        torch.cat(zeros, dim=1) if zeros else None,
    )
