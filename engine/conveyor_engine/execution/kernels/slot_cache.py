"""Holds the keys or the values of one layer in a paged cache, and defines how 8 bits represent them. Plain torch.

8 bits (e4m3 or int8) represent a vector as fractions of its largest magnitude, which is stored as its scale:

    x = number / LARGEST * scale

LARGEST is the largest number of the type. The head is the first dimension of the scales, so that the scales of a block
are adjacent.
"""

from dataclasses import dataclass

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class SlotCache:
    """The keys or the values of one layer, with one row for each token slot."""

    numbers: torch.Tensor  # (slots, Hkv, D)
    scales: torch.Tensor | None = None  # float32 (Hkv, slots), for 8-bit numbers only

    @classmethod
    def allocate(
        cls,
        slots: int,
        heads: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
        shared: torch.Tensor | None = None,
    ) -> "SlotCache":
        """Allocate a cache of zeros, with scales if the type has 8 bits (a key of `LARGEST`).

        shared: numbers of another cache, whose memory this cache uses too.
        """
        numbers = torch.zeros((slots, heads, dim), dtype=dtype, device=device) if shared is None else shared
        scales = torch.zeros((heads, slots), dtype=_SCALE, device=device) if dtype in LARGEST else None
        return cls(numbers.view(slots, heads, dim), scales)

    def after(self, slots: int) -> "SlotCache":
        """Return a view without the first slots."""
        if not slots:
            return self
        return SlotCache(self.numbers[slots:], None if self.scales is None else self.scales[:, slots:])

    def first(self, dim: int) -> "SlotCache":
        """Return a view with the first numbers of each head only, under the same scales."""
        return SlotCache(self.numbers[..., :dim], self.scales)

    @property
    def largest(self) -> float:
        """Return the largest number of an 8-bit type; 0 without scales."""
        return LARGEST[self.numbers.dtype] if self.scales is not None else 0.0

    @property
    def scales_stride(self) -> int | None:
        """Return the stride between the scales of two heads; None without scales."""
        return None if self.scales is None else self.scales.stride(0)


def slot_bytes(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of one slot, scales included."""
    return heads * dim * dtype.itemsize + scale_bytes(heads, dtype)


def scale_bytes(heads: int, dtype: torch.dtype) -> int:
    """Return the bytes of the scales of one slot."""
    return heads * _SCALE.itemsize if dtype in LARGEST else 0
