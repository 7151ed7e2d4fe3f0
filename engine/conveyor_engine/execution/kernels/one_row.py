"""Multiplies one row with a linear layer's weight, in one kernel with the norm before it and the activation or residual
after it.

Reading the weights limits the speed of a single request, and between two launches no program reads. Each program
computes a few rows of the weight. It loads their first columns, which no kernel writes, before it waits for the
previous kernel (programmatic dependent launch). So reading hardly pauses between two products.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import early_launch

_COLUMNS, _COLUMNS_OF_LONG_ROWS = 1024, 512  # columns of the weight that a program reads at once
_LONG = 4096  # columns; for longer rows, more programs at once read faster than more columns at once
_NUM_WARPS = 4
_MANY_ROWS = 8192  # rows of the weight from which on each program computes more rows
_FEW, _MORE = 4, 8  # rows per program


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMSNorm of the product's input. The weight is (in,)."""

    weight: torch.Tensor
    eps: float
    offset: float


@triton.jit
def _multiply_row(
    x, norm_weight, weight, bias, residual, out,
    eps, offset, size,
    IN: tl.constexpr, IN_PADDED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    results = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    rows = results
    if GATED:  # interleave: a row of the gate, its row of up, the next row of the gate, ...
        rows = results // 2 + results % 2 * (size // 2)
    real = results < size
    columns = tl.arange(0, COLUMNS)
    lines = weight + rows.to(tl.int64)[:, None] * IN + columns[None, :]
    now = tl.load(lines, mask=real[:, None] & (columns < IN)[None, :], other=0.0)
    soon = tl.load(lines + COLUMNS, mask=real[:, None] & (columns < IN - COLUMNS)[None, :], other=0.0)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_NORM:
        all_columns = tl.arange(0, IN_PADDED)
        whole = tl.load(x + all_columns, mask=all_columns < IN, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(whole * whole, axis=0) / IN + eps)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, IN, COLUMNS):
        later = begin + 2 * COLUMNS
        last = tl.load(lines + later, mask=real[:, None] & (columns < IN - later)[None, :], other=0.0)
        inside = columns < IN - begin
        values = tl.load(x + begin + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            weights = offset + tl.load(norm_weight + begin + columns, mask=inside, other=0.0).to(tl.float32)
            values = (values * scale * weights).to(x.dtype.element_ty).to(tl.float32)
        sums += now.to(tl.float32) * values[None, :]
        now = soon
        soon = last
    result = tl.sum(sums, axis=1)
    if HAS_BIAS:
        result += tl.load(bias + rows, mask=real, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        pairs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        gated = gate * tl.sigmoid(gate) * up
        tl.store(out + pairs, gated.to(out.dtype.element_ty), mask=pairs < size // 2)
    else:
        if HAS_RESIDUAL:
            result += tl.load(residual + results, mask=real, other=0.0).to(tl.float32)
        tl.store(out + results, result.to(out.dtype.element_ty), mask=real)


def multiply_row(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Return weight (out, in) @ norm(x) (1, in) + bias (out,) + residual (1, out), (1, out), rounded once.

    gated: return silu(gate) * up instead, (1, out / 2), where the first half of the product is the gate.
    """
    size, columns = weight.shape
    assert x.numel() == columns
    assert all(each is None or each.is_contiguous() for each in (x, weight, bias, residual))
    out = x.new_empty((1, size // 2 if gated else size))
    rows = _MORE if size >= _MANY_ROWS else _FEW
    _multiply_row[(triton.cdiv(size, rows),)](
        x, norm and norm.weight, weight, bias, residual, out,
        norm.eps if norm else 0.0, norm.offset if norm else 0.0, size,
        IN=columns, IN_PADDED=triton.next_power_of_2(columns), ROWS=rows,
        COLUMNS=_COLUMNS if columns < _LONG else _COLUMNS_OF_LONG_ROWS,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated,
        num_warps=_NUM_WARPS, **early_launch(),
    )  # fmt: skip
    return out
