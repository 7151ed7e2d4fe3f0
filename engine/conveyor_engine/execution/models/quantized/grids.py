"""Finds the scales and the numbers of a checkpoint's weights of 8 or 4 bits, so that the kernels can keep its bits.

Called by `reading` when a weight is packed. `gguf_blocks` does this for GGUF files.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from conveyor_engine.execution.models.quantized.layouts import (
    AWQ_ORDER,
    find_bits,
    find_gptq_bits,
    find_table_shape,
    read_scales,
    read_whole_scale,
    restore_awq,
    restore_gptq,
    restore_int8_rows,
    restore_mxfp4,
    restore_mxfp4_experts,
    restore_nvfp4,
    restore_packed,
    restore_scaled,
    restore_table,
    unpack_awq,
)
from conveyor_engine.execution.models.quantized.numbers import read_exponents, spread, unpack_nibbles, unpack_words
from conveyor_engine.execution.models.quantized.rounding import GROUPS, SMALLEST_GROUP, Grid, Rows
from conveyor_engine.execution.models.quantized.stored import StoredTensor
from conveyor_engine.quantization import Declared

_Parts = Mapping[str, StoredTensor]
Shape = tuple[int, ...]
_FP8: Final = "F8_E4M3"
_FP4: Final = (restore_nvfp4, restore_mxfp4, restore_mxfp4_experts)
_FP8_NAN: Final = 0x7F  # without its sign
_WHOLE: Final = ("_scale_2", "_global_scale")


def find_shape(parts: _Parts, declared: Declared, restore: Callable[..., Tensor]) -> Shape:
    """Return the shape of a weight."""
    return _READERS[restore].find_shape(parts, declared)


def read_grid(
    parts: _Parts, declared: Declared, restore: Callable[..., Tensor], keeps_floats: bool, shape: Shape
) -> Grid | None:
    """Return the grid of a weight of this shape; None if the kernels cannot keep its numbers.

    keeps_floats: whether they can keep FP8 and FP4.
    """
    if not keeps_floats and (restore in _FP4 or ("" in parts and parts[""].kind == _FP8)):
        return None
    grid = _READERS[restore].read_grid(parts, declared, shape[-1])
    return grid if grid is not None and len(grid.scales) == math.prod(shape[:-1]) else None


def _make_grid(bits: int, scales: Tensor, zeros: Tensor | None, columns: int, numbers: Rows) -> Grid | None:
    """Return the grid of scales (rows, groups). None if the kernels have no numbers or no groups like these.

    Groups are cut into smaller ones with the same scale: the kernels round inputs by group.
    """
    group, rest = divmod(columns, max(1, scales.shape[1]))
    size = next((size for size in GROUPS if group % size == 0), None)
    if bits not in (4, 8) or rest or size is None or (bits == 8 and zeros is not None):
        return None  # bfloat16 has too few bits for differences of two numbers of 8 bits
    if zeros is not None and zeros.shape != scales.shape:
        return None
    if scales.dtype != torch.bfloat16:
        scales = scales.float()
    parts = [None if each is None else each.repeat_interleave(group // size, 1) for each in (scales, zeros)]
    assert parts[0] is not None
    starts = None if parts[1] is None else parts[1].to(torch.int16).contiguous()
    return Grid(bits, parts[0].contiguous(), starts, numbers=numbers)


def _read_scaled(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    if parts[""].kind == _FP8:
        return _read_fp8(parts, declared, columns)
    scales, rows = parts["_scale"][...] if "_scale" in parts else None, parts[""].shape[0]
    if scales is None or parts[""].kind != "I8" or "_zero_point" in parts or len(parts[""].shape) != 2:
        return None
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    scales = scales.expand(rows, 1) if scales.numel() == 1 else scales

    def read(first: int, count: int) -> Tensor:
        return parts[""][first : first + count].view(torch.uint8) ^ 128

    return _make_grid(8, scales, None, columns, read) if len(scales) == rows else None


def _read_fp8(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    """Return the grid of FP8, which the kernels for GPUs keep: with a scale for the tensor, each row or each block.

    The weight is that of a layer or of several experts, (rows, columns) or (experts, rows, columns).
    """
    *rows, _ = parts[""].shape
    scales = read_scales({end: part[...] for end, part in parts.items() if end.startswith("_scale")})
    groups = scales.shape[-1] if scales.dim() > len(rows) else 1
    if "_zero_point" in parts or len(rows) not in (1, 2):
        return None
    scales = spread(scales, (*rows, groups), (declared.blocks[0], None)).expand(*rows, groups).flatten(0, -2)
    if groups > 1 and declared.blocks[1] not in (None, columns // groups):
        return None

    def read(first: int, count: int) -> Tensor:
        numbers = _read_rows(parts[""], first, count)
        if bool(((numbers & _FP8_NAN) == _FP8_NAN).any()):
            raise ValueError("a number or a scale is infinite or NaN")
        return numbers

    grid = _make_grid(8, scales, None, columns, read)
    return grid and replace(grid, is_float=True)


def _read_rows(part: StoredTensor, first: int, count: int) -> Tensor:
    """Return some rows of a layer's tensor, or of several experts' one, (count, bytes)."""
    each = part.shape[1] if len(part.shape) > 2 else 1
    begin = first // each
    stored = part[begin : -(-(first + count) // each)].view(torch.uint8)
    return stored.view(len(stored) * each, -1)[first - begin * each :][:count]


def _read_nvfp4(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    scales = parts["_scale"][...]
    if scales.dtype != torch.float8_e4m3fn or scales.shape[-1] * SMALLEST_GROUP != columns:
        return None
    whole = read_whole_scale({end: part[...] for end, part in parts.items() if end in _WHOLE})
    factors = spread(whole, scales.shape).expand(scales.shape).flatten(0, -2)
    numbers = partial(_read_fp4, parts["_packed" if "_packed" in parts else ""])
    return Grid(4, scales.flatten(0, -2), factors=factors[..., None].contiguous(), is_float=True, numbers=numbers)


def _read_mxfp4(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    """Powers of two are exact in bfloat16."""
    end = next(end for end in ("_packed", "_blocks", "") if end in parts)
    scales = read_exponents(parts["_scales" if end == "_blocks" else "_scale"][...]).flatten(0, -2)
    grid = _make_grid(4, scales.to(torch.bfloat16), None, columns, partial(_read_fp4, parts[end]))
    return grid and replace(grid, is_float=True)


def _read_fp4(part: StoredTensor, first: int, count: int) -> Tensor:
    return unpack_nibbles(_read_rows(part, first, count)).to(torch.uint8)


def _read_packed(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    rows, scales = parts["_packed"].shape[0], parts["_scale"][...]
    if len(parts["_packed"].shape) != 2 or scales.dim() != 2 or len(scales) != rows:
        return None
    groups = parts["_g_idx"][...] if "_g_idx" in parts else None
    order = None if groups is None or bool((groups == -1).all()) else _find_order(groups, columns, scales.shape[1])
    bits, zeros = find_bits(parts["_packed"].shape[-1], columns), None
    if "_zero_point" in parts:
        zeros = unpack_words(parts["_zero_point"][...].t(), bits, rows).t()

    def read(first: int, count: int) -> Tensor:
        return _sort(unpack_words(parts["_packed"][first : first + count], bits, columns), order)

    grid = _make_grid(bits, scales, zeros, columns, read)
    return grid and replace(grid, order=order)


def _read_awq(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    scales, each = parts["scales"][...], len(AWQ_ORDER)
    if scales.shape[-1] != each * parts["qweight"].shape[-1]:
        return None

    def read(first: int, count: int) -> Tensor:
        words = parts["qweight"][:, first // each : (first + count) // each]
        return unpack_awq(words, words.shape[1] * each).to(torch.uint8).t().contiguous()

    return _make_grid(4, scales.t(), unpack_awq(parts["qzeros"][...], scales.shape[-1]).t(), columns, read)


def _read_gptq(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    scales = parts["scales"][...]
    bits = find_gptq_bits(parts)
    order = _find_order(parts["g_idx"][...], columns, len(scales)) if "g_idx" in parts else None
    zeros = unpack_words(parts["qzeros"][...], bits, scales.shape[-1]) + declared.zero_offset
    is_symmetric = bool((zeros == 1 << bits - 1).all())

    def read(first: int, count: int) -> Tensor:
        return _sort(unpack_words(parts["qweight"][:, first : first + count].t(), bits, columns), order)

    grid = _make_grid(bits, scales.t(), None if is_symmetric else zeros.t(), columns, read)
    return grid and replace(grid, order=order)


def _find_order(groups: Tensor, columns: int, count: int) -> Tensor | None:
    """Return the columns sorted by their groups; None if they are. Raises ValueError if not all groups are alike."""
    in_order = torch.arange(columns) // (columns // max(1, count))
    sorted_groups, order = groups.long().sort(stable=True)
    if not torch.equal(sorted_groups, in_order):
        raise ValueError("groups have different numbers of columns")
    return None if torch.equal(groups.long(), in_order) else order.to(torch.int32)


def _sort(numbers: Tensor, order: Tensor | None) -> Tensor:
    return (numbers if order is None else numbers[:, order]).to(torch.uint8)


class _Reader(NamedTuple):
    read_grid: Callable[[_Parts, Declared, int], Grid | None]
    find_shape: Callable[[_Parts, Declared], Shape]


def _read_none(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    return None


def _find_fp4_shape(parts: _Parts, declared: Declared) -> Shape:
    *rows, pairs = parts["_packed" if "_packed" in parts else ""].shape
    return *rows, 2 * pairs


def _find_blocks_shape(parts: _Parts, declared: Declared) -> Shape:
    *rows, blocks, in_pairs = parts["_blocks"].shape
    return *rows, blocks * 2 * in_pairs


# 32: bits of a word.
_READERS: Final[Mapping[Callable[..., Tensor], _Reader]] = {
    restore_scaled: _Reader(_read_scaled, lambda parts, _: tuple(parts[""].shape)),
    restore_packed: _Reader(_read_packed, lambda parts, _: tuple(map(int, parts["_shape"][...].flatten()))),
    restore_awq: _Reader(_read_awq, lambda parts, _: (parts["scales"].shape[-1], parts["qweight"].shape[0])),
    restore_gptq: _Reader(
        _read_gptq,
        lambda parts, _: (parts["scales"].shape[-1], parts["qweight"].shape[0] * 32 // find_gptq_bits(parts)),
    ),
    restore_nvfp4: _Reader(_read_nvfp4, _find_fp4_shape),
    restore_mxfp4: _Reader(_read_mxfp4, _find_fp4_shape),
    restore_mxfp4_experts: _Reader(_read_mxfp4, _find_blocks_shape),
    restore_table: _Reader(_read_none, lambda parts, _: find_table_shape(parts)),
    restore_int8_rows: _Reader(_read_none, lambda parts, _: tuple(parts["weight"].shape)),
}
