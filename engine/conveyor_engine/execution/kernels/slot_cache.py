"""The keys or the values of one layer in a paged cache, and how 8 bits hold them. Plain torch.

8 bits (e4m3 or int8) hold a vector as fractions of its largest magnitude, which is its scale: with LARGEST as the
largest number of the type, x = number / LARGEST * scale. Scales lie heads first, so that a block's are side by side.
"""

from dataclasses import dataclass

import torch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SCALE = torch.float32


@dataclass(frozen=True, slots=True)
class SlotCache:
    """A row for each token slot."""

    numbers: torch.Tensor  # (slots, Hkv, D)
    scales: torch.Tensor | None = None  # float32 (Hkv, slots), of 8-bit numbers

    @classmethod
    def allocate(cls, slots: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device) -> "SlotCache":
        """Zeroed, with scales for a type of `LARGEST`."""
        numbers = torch.zeros((slots, heads, dim), dtype=dtype, device=device)
        return cls(numbers, torch.zeros((heads, slots), dtype=_SCALE, device=device) if dtype in LARGEST else None)

    @property
    def largest(self) -> float:
        """The largest number of an 8-bit type; 0 without scales."""
        return LARGEST[self.numbers.dtype] if self.scales is not None else 0.0

    @property
    def scales_stride(self) -> int | None:
        """The stride from one head's scales to the next head's; None without scales."""
        return None if self.scales is None else self.scales.stride(0)


def slot_bytes(heads: int, dim: int, dtype: torch.dtype) -> int:
    """Bytes of one slot, scales included."""
    return heads * (dim * dtype.itemsize + (_SCALE.itemsize if dtype in LARGEST else 0))
