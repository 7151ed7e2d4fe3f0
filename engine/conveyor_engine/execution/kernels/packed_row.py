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
from conveyor_engine.execution.kernels.packed_product import divisor_of, list_tensors, load_group, name_form, widen
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.weights import PAIR, Weights

_BYTES, _FEWER_BYTES = 512, 256  # of each output that a program reads at once; more would spill registers
_NUM_WARPS = 4
_OUTPUTS = 8  # of a program


@triton.jit
def _multiply_packed_row(
    x, norm_weight, order, numbers, scales, starts, factors, bias, residual, out,
    eps, offset, size,
    IN: tl.constexpr, IN_PADDED: tl.constexpr,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr, BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr, AT_ONCE: tl.constexpr, HAS_ORDER: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    OF_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    WIDTH: tl.constexpr = IN // OF_BYTE
    BLOCKS: tl.constexpr = AT_ONCE // BYTES
    results = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs = results
    if GATED:  # interleave, as `few_rows` does
        outputs = results // 2 + results % 2 * (size // 2)
    real = results < size
    places = tl.arange(0, AT_ONCE)
    lines = numbers + outputs.to(tl.int64)[:, None] * WIDTH + places[None, :]
    now = tl.load(lines, mask=real[:, None] & (places < WIDTH)[None, :], other=0)
    soon = tl.load(lines + AT_ONCE, mask=real[:, None] & (places < WIDTH - AT_ONCE)[None, :], other=0)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if HAS_NORM:
        all_columns = tl.arange(0, IN_PADDED)
        whole = tl.load(x + all_columns, mask=all_columns < IN, other=0.0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(whole * whole, axis=0) / IN + eps)
    sums = tl.zeros([OUTPUTS, BLOCKS], tl.float32)
    blocks = tl.arange(0, BLOCKS)
    for begin in range(0, WIDTH, AT_ONCE):
        later = begin + 2 * AT_ONCE
        last = tl.load(lines + later, mask=real[:, None] & (places < WIDTH - later)[None, :], other=0)
        inside = places < WIDTH - begin
        for high in tl.static_range(OF_BYTE):
            columns = ((begin + places) // BYTES * OF_BYTE + high) * BYTES + places % BYTES
            if HAS_ORDER:
                columns = tl.load(order + columns, mask=inside, other=0)
            values = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
            if HAS_NORM:
                weights = offset + tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
                values = (values * factor * weights).to(x.dtype.element_ty).to(tl.float32)
            products = widen(now, KIND, high == 1, tl.float32) * values[None, :]
            of_blocks = tl.sum(tl.reshape(products, (OUTPUTS, BLOCKS, BYTES)), axis=2)
            first = ((begin // BYTES + blocks) * OF_BYTE + high) * BYTES  # inputs of blocks
            groups = (first * 0 if GROUP == 0 else first // GROUP)[None, :] * size + outputs[:, None]
            of_factors = groups * 0 + outputs[:, None]
            if FACTOR is not None and FACTOR > 0:
                of_factors += (first // FACTOR * (2 if STARTS == "minima" else 1) * size)[None, :]
            known = real[:, None] & (blocks < (WIDTH - begin) // BYTES)[None, :]
            scale, start = load_group(scales, starts, factors, groups, of_factors, size, known, KIND, STARTS, FACTOR)
            of_blocks *= scale
            if KIND == "int4" or STARTS == "minima":
                of_inputs = tl.sum(tl.reshape(values, (BLOCKS, BYTES)), axis=1)[None, :]
                of_blocks -= (start if STARTS == "minima" else start * scale) * of_inputs
            sums += of_blocks
        now = soon
        soon = last
    result = tl.sum(sums, axis=1)
    if FACTOR == 0:
        result *= tl.load(factors + outputs, mask=real, other=0.0).to(tl.float32)
    if KIND == "fp8" or KIND == "fp4":
        result *= divisor_of(KIND)
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
    size, columns = weights.out_features, weights.in_features
    assert x.numel() == columns
    assert all(each is None or each.is_contiguous() for each in (x, bias, residual))
    out = x.new_empty((1, size // 2 if gated else size))
    _multiply_packed_row[(triton.cdiv(size, _OUTPUTS),)](
        x, norm and norm.weight, weights.order, *list_tensors(weights), bias, residual, out,
        norm.eps if norm else 0.0, norm.offset if norm else 0.0, size,
        IN=columns, IN_PADDED=triton.next_power_of_2(columns), **name_form(weights),
        OUTPUTS=_OUTPUTS, AT_ONCE=_BYTES if weights.starts is None and weights.pair == PAIR else _FEWER_BYTES,
        HAS_ORDER=weights.order is not None,
        HAS_NORM=norm is not None, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, GATED=gated,
        num_warps=_NUM_WARPS, **early_launch(),
    )  # fmt: skip
    return out
