"""Multiplies up to four rows with a linear layer's weight, in one kernel with the norm before it and the activation or
residual after it.

Reading the weights limits the speed of a few requests, and between two launches no program reads. Each program
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
_FEW, _MORE = 4, 8  # rows of the weight per program
_MOST_SUMS = 8192  # of a program: 64 registers of each thread
MOST_ROWS = 4  # of the input


@dataclass(frozen=True, slots=True)
class Norm:
    """The RMSNorm of the product's input. The weight is (in,)."""

    weight: torch.Tensor
    eps: float
    offset: float


@triton.jit(do_not_specialize=["num_rows"])
def _multiply_rows(
    x, norm_weight, weight, bias, residual, out,
    eps, offset, size, num_rows,
    IN: tl.constexpr, IN_PADDED: tl.constexpr, NUM_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
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
    first, second, third, fourth = 1.0, 1.0, 1.0, 1.0  # by which the norm multiplies the rows of x
    if HAS_NORM:
        first = _find_scale(x, 0, num_rows, eps, IN, IN_PADDED)
        if NUM_ROWS > 1:
            second = _find_scale(x, 1, num_rows, eps, IN, IN_PADDED)
        if NUM_ROWS > 2:
            third = _find_scale(x, 2, num_rows, eps, IN, IN_PADDED)
            fourth = _find_scale(x, 3, num_rows, eps, IN, IN_PADDED)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    of_second, of_third, of_fourth = sums, sums, sums
    for begin in range(0, IN, COLUMNS):
        later = begin + 2 * COLUMNS
        last = tl.load(lines + later, mask=real[:, None] & (columns < IN - later)[None, :], other=0.0)
        weights, place = now.to(tl.float32), begin + columns
        factors = columns.to(tl.float32)  # unused without a norm
        if HAS_NORM:
            factors = offset + tl.load(norm_weight + place, mask=place < IN, other=0.0).to(tl.float32)
        sums += weights * _load_part(x, 0, num_rows, place, first, factors, IN, HAS_NORM)[None, :]
        if NUM_ROWS > 1:
            of_second += weights * _load_part(x, 1, num_rows, place, second, factors, IN, HAS_NORM)[None, :]
        if NUM_ROWS > 2:
            of_third += weights * _load_part(x, 2, num_rows, place, third, factors, IN, HAS_NORM)[None, :]
            of_fourth += weights * _load_part(x, 3, num_rows, place, fourth, factors, IN, HAS_NORM)[None, :]
        now = soon
        soon = last
    biases = tl.zeros([ROWS], tl.float32)
    if HAS_BIAS:
        biases = tl.load(bias + rows, mask=real, other=0.0).to(tl.float32)
    _finish(sums, 0, num_rows, biases, residual, out, results, size, ROWS, HAS_RESIDUAL, GATED)
    if NUM_ROWS > 1:
        _finish(of_second, 1, num_rows, biases, residual, out, results, size, ROWS, HAS_RESIDUAL, GATED)
    if NUM_ROWS > 2:
        _finish(of_third, 2, num_rows, biases, residual, out, results, size, ROWS, HAS_RESIDUAL, GATED)
        _finish(of_fourth, 3, num_rows, biases, residual, out, results, size, ROWS, HAS_RESIDUAL, GATED)


@triton.jit
def _find_scale(x, row, num_rows, eps, IN: tl.constexpr, IN_PADDED: tl.constexpr):
    columns = tl.arange(0, IN_PADDED)
    values = tl.load(x + row * IN + columns, mask=columns < tl.where(row < num_rows, IN, 0), other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(values * values, axis=0) / IN + eps)


@triton.jit
def _load_part(x, row, num_rows, place, scale, factors, IN: tl.constexpr, HAS_NORM: tl.constexpr):
    """Return some columns of a row of x, normed and rounded."""
    values = tl.load(x + row * IN + place, mask=place < tl.where(row < num_rows, IN, 0), other=0.0).to(tl.float32)
    if HAS_NORM:
        values = (values * scale * factors).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def _finish(
    sums, row, num_rows, biases, residual, out, results, size,
    ROWS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Write the results of a row of x."""
    result = tl.sum(sums, axis=1) + biases
    if GATED:
        gate, up = tl.split(tl.reshape(result, (ROWS // 2, 2)))
        pairs = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
        gated = gate * tl.sigmoid(gate) * up
        real = pairs < tl.where(row < num_rows, size // 2, 0)
        tl.store(out + row * (size // 2) + pairs, gated.to(out.dtype.element_ty), mask=real)
    else:
        real = results < tl.where(row < num_rows, size, 0)
        if HAS_RESIDUAL:
            result += tl.load(residual + row * size + results, mask=real, other=0.0).to(tl.float32)
        tl.store(out + row * size + results, result.to(out.dtype.element_ty), mask=real)


def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Return norm(x) (T, in) @ weight (out, in) + bias (out,) + residual (T, out), (T, out), rounded once; T <= 4.

    gated: return silu(gate) * up instead, (T, out / 2), where the first half of the product is the gate.
    """
    (num_rows, columns), size = x.shape, len(weight)
    assert 0 < num_rows <= MOST_ROWS
    assert weight.shape[1] == columns
    assert all(each is None or each.is_contiguous() for each in (x, weight, bias, residual))
    out = x.new_empty((num_rows, size // 2 if gated else size))
    rows, padded = _MORE if size >= _MANY_ROWS else _FEW, triton.next_power_of_2(num_rows)
    at_once = min(_COLUMNS if columns < _LONG else _COLUMNS_OF_LONG_ROWS, _MOST_SUMS // (rows * padded))
    _multiply_rows[(triton.cdiv(size, rows),)](
        x, norm and norm.weight, weight, bias, residual, out,
        norm.eps if norm else 0.0, norm.offset if norm else 0.0, size, num_rows,
        IN=columns, IN_PADDED=triton.next_power_of_2(columns), NUM_ROWS=padded, ROWS=rows, COLUMNS=at_once,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated,
        num_warps=_NUM_WARPS, **early_launch(),
    )  # fmt: skip
    return out
