"""Unpacks small numbers and applies their scales. Pure; called by `layouts`.

Sources: FP4 E2M1 and E8M0 scales are from the OCP Microscaling Formats specification 1.0, sections 5.3.3 and 5.4.1.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

# Of FP4 E2M1: sign, two bits of exponent, one bit of mantissa.
_FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_WORD_BITS = 32


def unpack_words(packed: Tensor, bits: int, count: int) -> Tensor:
    """Return the unsigned numbers (..., count), int32, in int32 words (..., ceil(count * bits / 32)).

    Number i begins at bit i * bits, and may continue in the next word.
    """
    largest = (1 << bits) - 1
    if _WORD_BITS % bits == 0:
        offsets = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
        return ((packed[..., None] >> offsets) & largest).flatten(-2)[..., :count]
    starts = torch.arange(count) * bits
    words, offsets = starts // _WORD_BITS, starts % _WORD_BITS
    wide = torch.nn.functional.pad(packed, (0, 1)).to(torch.int64) & 0xFFFF_FFFF
    both = wide[..., words] | (wide[..., words + 1] << _WORD_BITS)
    return ((both >> offsets) & largest).to(torch.int32)


def unpack_nibbles(packed: Tensor, high_first: bool = False) -> Tensor:
    """Return the two numbers in each byte of `packed` (..., n) as int32 (..., 2 n)."""
    low, high = packed.to(torch.int32) & 15, packed.to(torch.int32) >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def read_fp4(packed: Tensor) -> Tensor:
    """Return the FP4 numbers in uint8 `packed` (..., n), low half first, as float32 (..., 2 n)."""
    return look_up_fp4(unpack_nibbles(packed))


def look_up_fp4(numbers: Tensor) -> Tensor:
    """Return FP4 numbers in float32. numbers: one for each element, from 0 to 15."""
    return _FP4.to(numbers.device)[numbers.to(torch.int32)]


def read_exponents(stored: Tensor) -> Tensor:
    """Return powers of two in float32 from E8M0 numbers, also stored as uint8. 255 means NaN. Raises ValueError."""
    if stored.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise ValueError(f"scales are {stored.dtype}, and no powers of two")
    exponents = stored.view(torch.uint8).to(torch.float32) - 127
    return torch.where(exponents == 128, torch.nan, torch.exp2(exponents))


def spread(scales: Tensor, shape: Sequence[int], blocks: Sequence[int | None] = ()) -> Tensor:
    """Repeat `scales` (..., r, c), one for each block, so that they have `shape` (..., rows, columns).

    A scale without dimensions, or of one number, is for the whole tensor, and one of (rows,) for each row. blocks: the
    rows and columns of a block, None for a number that follows from the shapes. Raises ValueError.
    """
    if scales.numel() == 1:
        return scales.reshape([1] * len(shape))
    if scales.dim() == 1:
        scales = scales[:, None]
    if scales.dim() == len(shape) - 1:  # one for each row of each expert
        scales = scales[..., None]
    if scales.dim() != len(shape) or scales.shape[:-2] != torch.Size(shape[:-2]):
        raise ValueError(f"scales of {tuple(scales.shape)} do not fit weights of {tuple(shape)}")
    rows, columns = blocks or (None, None)
    each = _count_repeats(scales.shape[-2], shape[-2], rows), _count_repeats(scales.shape[-1], shape[-1], columns)
    for dim, repeats in zip((-2, -1), each, strict=True):  # both fit, so no result is much larger than `shape`
        if repeats > 1:
            scales = scales.repeat_interleave(repeats, dim).narrow(dim, 0, shape[dim])
    return scales


def _count_repeats(count: int, size: int, block: int | None) -> int:
    if count in (1, size):
        return 1
    each = block or size // max(1, count)
    if each < 1 or -(-size // each) != count:  # without a known size of blocks, all must be alike
        raise ValueError(f"{count} scales do not fit {size} numbers")
    return each


def repeat_up_to(scales: Tensor, each: int, size: int) -> Tensor:
    """Repeat every one of `scales` (n,) `each` times, up to `size` numbers in all. Raises ValueError."""
    if each < 1 or -(-size // each) != len(scales):
        raise ValueError(f"{len(scales)} scales for {each} numbers each do not fit {size} numbers")
    return scales.repeat_interleave(min(each, size))[:size]
