"""Reads the scales and the numbers of a GGUF file's blocks, so that the compiled kernels can keep them.

A block has the numbers of some inputs of a row, and their scales. The K types have a block of 256 inputs: a factor in
float16, and for 16 or 32 inputs a scale, and in some types a minimum, as whole numbers. Called by `gguf_weights`.
Layouts: github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from conveyor_engine.execution.models.quantized.numbers import read_exponents
from conveyor_engine.execution.models.quantized.rounding import Grid
from conveyor_engine.gguf.header import TensorPlace

_ROWS: Final = 512  # read at once


def read_bytes(place: TensorPlace) -> Tensor:
    """Return the stored bytes of a tensor, uint8. Nothing may write to them."""
    return as_bytes(place.read())


def as_bytes(content: bytes) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read only
        return torch.frombuffer(content, dtype=torch.uint8)


def read_blocks(place: TensorPlace, keeps_floats: bool) -> Grid | None:
    """Return the values of a stored matrix, or of several one below the other.

    Returns None if the kernels have no numbers like these. keeps_floats: whether they have FP4.
    """
    blocks = _BLOCKS.get(place.kind.name)
    if blocks is None or len(place.shape) < 2 or (blocks.read_grid is _read_mxfp4 and not keeps_floats):
        return None
    bytes_of_row, num_bytes = place.num_bytes // math.prod(place.shape[:-1]), place.kind.num_bytes

    def read(first: int, count: int) -> Tensor:
        content = place.read(first * bytes_of_row, count * bytes_of_row)
        return as_bytes(content).view(-1, bytes_of_row // num_bytes, num_bytes)

    def read_numbers(first: int, count: int) -> Tensor:
        return blocks.read_numbers(read(first, count)).flatten(1)

    rows = math.prod(place.shape[:-1])
    grids = [blocks.read_grid(read(first, _ROWS)) for first in range(0, rows, _ROWS)]
    columns = (
        [part for part in column if part is not None] for column in zip(*(grid.parts for grid in grids), strict=True)
    )
    parts = (torch.cat(column) if column else None for column in columns)
    return grids[0].with_parts(parts, read_numbers)


class _Blocks(NamedTuple):
    """Read a type's blocks (rows, blocks, bytes of a block): scales, and numbers (rows, blocks, inputs)."""

    read_grid: Callable[[Tensor], Grid]
    read_numbers: Callable[[Tensor], Tensor]


def _read_symmetric(bits: int, blocks: Tensor) -> Grid:
    return Grid(bits, _as_float16(blocks[..., :2]).flatten(1))


def _read_with_minima(bits: int, blocks: Tensor) -> Grid:
    """Read eight scales and eight minima of 6 bits in 12 bytes, behind the two factors."""
    first, second, third = blocks[..., 4:16].chunk(3, dim=2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=2)
    return Grid(bits, _as_int8(scales), None, _as_int8(minima), _as_float16(blocks[..., :4]))


def _read_mxfp4(blocks: Tensor) -> Grid:
    return Grid(4, read_exponents(blocks[..., 0].contiguous()).to(torch.bfloat16), is_float=True)


def _read_q6_k(blocks: Tensor) -> Grid:
    return Grid(6, _as_int8(blocks[..., 192:208]), factors=_as_float16(blocks[..., 208:]))


def _as_float16(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float16)


def _as_int8(stored: Tensor) -> Tensor:
    return stored.flatten(1).contiguous().view(torch.int8)


def _halves(stored: Tensor, size: int) -> Tensor:
    """Return the low halves of `size` bytes, then their high halves, then those of the next ones."""
    grouped = stored.view(*stored.shape[:-1], -1, size)
    return torch.stack((grouped & 15, grouped >> 4), dim=-2).flatten(-3)


def _bits(stored: Tensor, bits: int) -> Tensor:
    """Return the lowest bits of all bytes, then the next ones, (..., 8 / bits, bytes)."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)[:, None]
    return stored[..., None, :] >> shifts & (1 << bits) - 1


def _number_q5_0(blocks: Tensor) -> Tensor:
    fifth = blocks[..., 2:6, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return _halves(blocks[..., 6:], 16) | fifth.flatten(-2) << 4


def _number_q5_k(blocks: Tensor) -> Tensor:
    return _halves(blocks[..., 48:], 32) | _bits(blocks[..., 16:48], 1).flatten(-2) << 4


def _number_q6_k(blocks: Tensor) -> Tensor:
    high = _bits(blocks[..., 128:192].view(*blocks.shape[:-1], 2, 32), 2).flatten(-3)
    return _halves(blocks[..., :128], 64) | high << 4


_BLOCKS: Final[Mapping[str, _Blocks]] = {
    "Q4_0": _Blocks(partial(_read_symmetric, 4), lambda blocks: _halves(blocks[..., 2:], 16)),
    "Q5_0": _Blocks(partial(_read_symmetric, 5), _number_q5_0),
    "Q8_0": _Blocks(partial(_read_symmetric, 8), lambda blocks: blocks[..., 2:] ^ 128),
    "Q4_K": _Blocks(partial(_read_with_minima, 4), lambda blocks: _halves(blocks[..., 16:], 32)),
    "Q5_K": _Blocks(partial(_read_with_minima, 5), _number_q5_k),
    "Q6_K": _Blocks(_read_q6_k, _number_q6_k),
    "MXFP4": _Blocks(_read_mxfp4, lambda blocks: _halves(blocks[..., 1:], 16)),
}

# Types whose scales have two levels, so that layers of different types can be joined.
K_TYPES: Final = frozenset({"Q4_K", "Q5_K", "Q6_K"})
# Bits of a number with its scales, in the layout of the kernels for CPUs, and of those for GPUs; and where our layers
# join types.
KEPT_BITS: Final = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_0": 5.5, "Q5_K": 5.625, "Q6_K": 6.5625, "Q8_0": 8.5}
JOINED_BITS: Final = 7.125
GPU_BITS: Final = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_0": 8.5, "Q5_K": 8.625, "Q6_K": 8.5625, "Q8_0": 8.5, "MXFP4": 4.5}
JOINED_GPU_BITS: Final = 9.125
