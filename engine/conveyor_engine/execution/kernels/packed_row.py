"""Multiplies one row with weights of 4 or 8 bits, in one kernel with the norm before it and the activation or residual
after it.

As `few_rows` does with weights of 16 bits: each program computes a few outputs, and loads their first numbers before it
waits for the previous kernel.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.few_rows import Norm
from conveyor_engine.execution.kernels.packed_product import FP8_SCALE, widen
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.weights import PAIR, Weights

_BYTES, _BYTES_WITH_ZEROS = 512, 256  # of each output that a program reads at once; more would spill registers
_NUM_WARPS = 4
_OUTPUTS = 8  # of a program
_PAIR = tl.constexpr(PAIR)


@triton.jit
def _multiply_packed_row(
    x, norm_weight, numbers, scales, zeros, bias, residual, out,
    eps, offset, size,
    IN: tl.constexpr, IN_PADDED: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    OUTPUTS: tl.constexpr, BYTES: tl.constexpr, HAS_ZEROS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    OF_BYTE: tl.constexpr = 2 if KIND == "int4" else 1
    WIDTH: tl.constexpr = IN // OF_BYTE
    BLOCKS: tl.constexpr = BYTES // _PAIR
    results = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs = results
    if GATED:  # interleave, as `few_rows` does
        outputs = results // 2 + results % 2 * (size // 2)
    real = results < size
    places = tl.arange(0, BYTES)
    lines = numbers + outputs.to(tl.int64)[:, None] * WIDTH + places[None, :]
    now = tl.load(lines, mask=real[:, None] & (places < WIDTH)[None, :], other=0)
    soon = tl.load(lines + BYTES, mask=real[:, None] & (places < WIDTH - BYTES)[None, :], other=0)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_NORM:
        all_columns = tl.arange(0, IN_PADDED)
        whole = tl.load(x + all_columns, mask=all_columns < IN, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(whole * whole, axis=0) / IN + eps)
    sums = tl.zeros([OUTPUTS, BLOCKS], tl.float32)
    blocks = tl.arange(0, BLOCKS)
    for begin in range(0, WIDTH, BYTES):
        later = begin + 2 * BYTES
        last = tl.load(lines + later, mask=real[:, None] & (places < WIDTH - later)[None, :], other=0)
        inside = places < WIDTH - begin
        for high in tl.static_range(OF_BYTE):
            columns = ((begin + places) // _PAIR * OF_BYTE + high) * _PAIR + places % _PAIR
            values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORM:
                weights = offset + tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
                values = (values * factor * weights).to(x.dtype.element_ty).to(tl.float32)
            products = widen(now, KIND, high == 1, tl.float32) * values[None, :]
            of_blocks = tl.sum(tl.reshape(products, (OUTPUTS, BLOCKS, _PAIR)), axis=2)
            groups = ((begin // _PAIR + blocks) * OF_BYTE + high) * _PAIR // GROUP
            of_groups = groups[None, :] * size + outputs[:, None]
            known = real[:, None] & (blocks < (WIDTH - begin) // _PAIR)[None, :]
            if KIND == "int4":
                zero = tl.full([OUTPUTS, BLOCKS], 8, tl.float32)
                if HAS_ZEROS:
                    zero = tl.load(zeros + of_groups, mask=known, other=0).to(tl.float32)
                of_blocks -= zero * tl.sum(tl.reshape(values, (BLOCKS, _PAIR)), axis=1)[None, :]
            sums += of_blocks * tl.load(scales + of_groups, mask=known, other=0.0).to(tl.float32)
        now = soon
        soon = last
    result = tl.sum(sums, axis=1)
    if KIND == "fp8":
        result *= FP8_SCALE
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=real, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.reshape(result, (OUTPUTS // 2, 2)))
        pairs = tl.program_id(0) * (OUTPUTS // 2) + tl.arange(0, OUTPUTS // 2)
        gated = gate * tl.sigmoid(gate) * up
        tl.store(out + pairs, gated.to(out.dtype.element_ty), mask=pairs < size // 2)
    else:
        if HAS_RESIDUAL:
            result += tl.load(residual + results, mask=real, other=0.0).to(tl.float32)
        tl.store(out + results, result.to(out.dtype.element_ty), mask=real)


def multiply_packed_row(
    x: torch.Tensor,
    weights: Weights,
    bias: torch.Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Return what `multiply_rows` returns of one row, with these weights."""
    size, columns, has_zeros = weights.out_features, weights.in_features, weights.zeros is not None
    assert x.numel() == columns
    assert all(each is None or each.is_contiguous() for each in (x, bias, residual))
    out = x.new_empty((1, size // 2 if gated else size))
    _multiply_packed_row[(triton.cdiv(size, _OUTPUTS),)](
        x, norm and norm.weight, weights.numbers, weights.scales, weights.zeros, bias, residual, out,
        norm.eps if norm else 0.0, norm.offset if norm else 0.0, size,
        IN=columns, IN_PADDED=triton.next_power_of_2(columns), GROUP=weights.group, KIND=weights.kind,
        OUTPUTS=_OUTPUTS, BYTES=_BYTES_WITH_ZEROS if has_zeros else _BYTES, HAS_ZEROS=has_zeros,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated,
        num_warps=_NUM_WARPS, **early_launch(),
    )  # fmt: skip
    return out
