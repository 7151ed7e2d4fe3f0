"""Reads which values the blocks of a GGUF file have, so that the compiled kernels can keep its numbers.

A block has the numbers of some inputs of a row, and their scales. The K types have a block of 256 inputs: a factor in
float16, and for 16 or 32 inputs a scale, and in some types a minimum, as whole numbers. Called by `gguf_weights`.
Layouts: github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
from torch import Tensor

from conveyor_engine.execution.models.quantized.rounding import Grid
from conveyor_engine.gguf.header import TensorPlace


def read_bytes(place: TensorPlace) -> Tensor:
    """Return the stored bytes of a tensor, uint8. Nothing may write to them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the bytes are read only
        return torch.frombuffer(place.read(), dtype=torch.uint8)


def read_blocks(place: TensorPlace) -> Grid | None:
    """Return the values of a stored matrix, or of several one below the other.

    Returns None if the kernels have no numbers like these.
    """
    read = _READERS.get(place.kind.name)
    if read is None or len(place.shape) < 2:
        return None
    return read(read_bytes(place).view(math.prod(place.shape[:-1]), -1, place.kind.num_bytes))


def _read_symmetric(bits: int, blocks: Tensor) -> Grid:
    return Grid(bits, _as_float16(blocks[..., :2]).flatten(1))


def _read_with_minima(bits: int, blocks: Tensor) -> Grid:
    """Read eight scales and eight minima of 6 bits in 12 bytes, behind the two factors."""
    first, second, third = blocks[..., 4:16].chunk(3, dim=2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), dim=2)
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), dim=2)
    return Grid(bits, _as_int8(scales), None, _as_int8(minima), _as_float16(blocks[..., :4]))


def _read_q6_k(blocks: Tensor) -> Grid:
    return Grid(6, _as_int8(blocks[..., 192:208]), factors=_as_float16(blocks[..., 208:]))


def _as_float16(stored: Tensor) -> Tensor:
    return stored.contiguous().view(torch.float16)


def _as_int8(stored: Tensor) -> Tensor:
    return stored.flatten(1).contiguous().view(torch.int8)


_READERS: Final[Mapping[str, Callable[[Tensor], Grid]]] = {
    "Q4_0": partial(_read_symmetric, 4),
    "Q5_0": partial(_read_symmetric, 5),
    "Q8_0": partial(_read_symmetric, 8),
    "Q4_K": partial(_read_with_minima, 4),
    "Q5_K": partial(_read_with_minima, 5),
    "Q6_K": _read_q6_k,
}

# Bits of a number with its scales, in the kernels' layout; and where our layers join types.
KEPT_BITS: Final = {"Q4_0": 4.5, "Q4_K": 4.625, "Q5_0": 5.5, "Q5_K": 5.625, "Q6_K": 6.5625, "Q8_0": 8.5}
JOINED_BITS: Final = 7.125
