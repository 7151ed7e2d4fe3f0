"""Finds the values that a checkpoint's weights of 8 or 4 bits can take, so that the compiled kernels can keep its bits.

Called by `loader` after transformers has loaded the restored weights. Reads scales and zero points, and no numbers.
`gguf_blocks` does this for GGUF files.
"""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from conveyor_engine.execution.models.quantized.layouts import (
    find_bits,
    read_scales,
    restore_awq,
    restore_gptq,
    restore_packed,
    restore_scaled,
    unpack_awq,
)
from conveyor_engine.execution.models.quantized.numbers import spread, unpack_words
from conveyor_engine.execution.models.quantized.reading import Restored, Restoring
from conveyor_engine.execution.models.quantized.rounding import GROUPS, Grid
from conveyor_engine.execution.models.quantized.stored import StoredTensor
from conveyor_engine.quantization import Declared

_Parts = Mapping[str, StoredTensor]


def keep_grids(model: nn.Module, restoring: Restoring) -> None:
    """Set `grid` of each linear layer and embedding whose weights the kernels can keep as they are stored."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    linears = {part.weight: part for part in model.modules() if isinstance(part, nn.Linear)}  # the head may be tied
    tables = {part.weight: part for part in model.modules() if type(part) is nn.Embedding}  # others scale their rows
    for name, weight in restoring.tensors.items():
        modules = [of[parameters[name]] for of in (linears, tables) if parameters.get(name) in of]
        if modules and isinstance(weight, Restored):
            grid = read_grid(weight, *modules[0].weight.shape)
            for module in modules:
                module.grid = grid  # type: ignore[assignment]


def read_grid(weight: Restored, rows: int, columns: int) -> Grid | None:
    """Return the grid of a weight of this shape; None if the kernels cannot keep its numbers."""
    if weight.source is None:
        grid = weight.read_grid() if weight.read_grid else None
    else:
        read = _READERS.get(weight.source.layout.restore)
        grid = read(weight.source.parts, weight.source.declared, columns) if read else None
    return grid if grid is not None and len(grid.scales) == rows else None


def _make_grid(bits: int, scales: Tensor, zeros: Tensor | None, columns: int) -> Grid | None:
    """Return the grid of scales (rows, groups). None if the kernels have no numbers or no groups like these.

    Groups are cut into smaller ones with the same scale: the kernels round inputs by group.
    """
    group, rest = divmod(columns, scales.shape[1])
    size = next((size for size in GROUPS if group % size == 0), None)
    if bits not in (4, 8) or rest or size is None or (bits == 8 and zeros is not None):
        return None  # bfloat16 has too few bits for differences of two numbers of 8 bits
    if scales.dtype != torch.bfloat16:
        scales = scales.float()
    parts = [None if each is None else each.repeat_interleave(group // size, 1) for each in (scales, zeros)]
    assert parts[0] is not None
    return Grid(bits, parts[0].contiguous(), None if parts[1] is None else parts[1].to(torch.int16).contiguous())


def _read_scaled(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    if parts[""].kind == "F8_E4M3":
        return _read_fp8(parts, declared, columns)
    scales, rows = parts["_scale"][...] if "_scale" in parts else None, parts[""].shape[0]
    if scales is None or parts[""].kind != "I8" or "_zero_point" in parts or len(parts[""].shape) != 2:
        return None
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    scales = scales.expand(rows, 1) if scales.numel() == 1 else scales
    return _make_grid(8, scales, None, columns) if len(scales) == rows else None


def _read_fp8(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    """Return the grid of FP8, which the kernels for GPUs keep: with a scale for the tensor, each row or each block."""
    rows = parts[""].shape[0]
    scales = read_scales({end: part[...] for end, part in parts.items() if end.startswith("_scale")})
    if "_zero_point" in parts or len(parts[""].shape) != 2 or scales.dim() > 2:
        return None
    scales = scales.reshape(-1, 1) if scales.dim() < 2 else scales
    scales = spread(scales, (rows, scales.shape[1]), (declared.blocks[0], None)).expand(rows, -1)
    each, rest = divmod(columns, scales.shape[1])
    blocks = declared.blocks[1] if scales.shape[1] > 1 else None
    if rest or each % GROUPS[-1] or each != (blocks or each):
        return None
    return Grid(8, scales.contiguous(), is_float=True)


def _read_packed(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    shape = [int(size) for size in parts["_shape"][...]]
    scales = parts["_scale"][...]
    if "_g_idx" in parts or len(shape) != 2 or scales.dim() != 2 or len(scales) != shape[0]:
        return None
    bits, zeros = find_bits(parts["_packed"].shape[-1], columns), None
    if "_zero_point" in parts:
        zeros = unpack_words(parts["_zero_point"][...].t(), bits, shape[0]).t()
    return _make_grid(bits, scales, zeros, columns)


def _read_awq(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    scales = parts["scales"][...]
    return _make_grid(4, scales.t(), unpack_awq(parts["qzeros"][...], scales.shape[-1]).t(), columns)


def _read_gptq(parts: _Parts, declared: Declared, columns: int) -> Grid | None:
    scales, bits = parts["scales"][...], declared.bits
    if "g_idx" in parts:
        groups = torch.arange(columns) // (columns // len(scales))
        if not torch.equal(parts["g_idx"][...].long(), groups):
            return None
    zeros = unpack_words(parts["qzeros"][...], bits, scales.shape[-1]) + declared.zero_offset
    is_symmetric = bool((zeros == 1 << bits - 1).all())
    return _make_grid(bits, scales.t(), None if is_symmetric else zeros.t(), columns)


_READERS: Final[Mapping[Callable[..., Tensor], Callable[[_Parts, Declared, int], Grid | None]]] = {
    restore_scaled: _read_scaled,
    restore_packed: _read_packed,
    restore_awq: _read_awq,
    restore_gptq: _read_gptq,
}
