"""Multiplies rows with weights of 4 or 8 bits, which stay so in memory.

- Up to 256 rows: a kernel that makes the numbers of each tile 16 bits wide in registers and multiplies on tensor cores.
  Scales are applied to the sums of a group. A product with few tiles is split along its inputs, and another kernel
  adds up the parts.
- For more rows, some outputs at a time are restored to 16 bits, and cuBLAS multiplies. What is restored fits into the
  cache that all multiprocessors share, so memory is read in the small format only.

A lone row of a decoder layer has a kernel of its own (`packed_row`).
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import has_warp_groups
from conveyor_engine.execution.kernels.weights import Weights

_MOST_ROWS = 256  # from here on, each tile of weights would be widened more than four times
_RESTORED = 2**24  # numbers restored at once: 32 MiB
_PROGRAMS = 512  # at least so many, if the parts of a split product stay longer than this:
_LEAST_BLOCKS = 8
_TILES = ((16, 64, 4), (32, 64, 4), (64, 128, 8))  # rows, outputs, warps
_TILE_WITH_MINIMA = (16, 32, 4)  # a larger one would spill registers on 8.6 and 12.0
NUM_STAGES = 4
_JOINED = 1024
_OUTPUTS, _RESTORED_BYTES = 8, 256  # of a program that restores


@triton.jit
def widen(stored, KIND: tl.constexpr, HIGH: tl.constexpr, TYPE: tl.constexpr):
    """Return stored bytes as numbers of TYPE: of int4 plus `offset_of`, of FP8 and FP4 divided by `divisor_of`."""
    if KIND == "int8":
        return stored.to(TYPE)
    if KIND == "fp8":  # with the bias of float16's exponents, and one bit less in front of it
        bits = stored.to(tl.uint16)
        return (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True).to(TYPE)
    number = stored >> 4 if HIGH else stored & 15
    if KIND == "fp4":
        bits = number.to(tl.uint16)
        return (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True).to(TYPE)
    if tl.bfloat16 == TYPE:
        return (number.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
    if tl.float16 == TYPE:
        return (number.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True)
    return number.to(TYPE)


@triton.jit
def offset_of(TYPE: tl.constexpr):
    """Return what `widen` adds: the number in whose last bits a number of 4 bits fits."""
    if tl.bfloat16 == TYPE:
        return 128
    if tl.float16 == TYPE:
        return 1024
    return 0


@triton.jit
def divisor_of(KIND: tl.constexpr):
    """Return by what `widen` divides: 2 to the difference of the biases of exponents."""
    return 256.0 if KIND == "fp8" else 16384.0 if KIND == "fp4" else 1.0


@triton.jit
def load_group(
    scales, starts, factors, places, of_factors, size, mask,
    KIND: tl.constexpr, STARTS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """Return the scales, and the zeros or minima, at `places` of `scales`, in float32.

    of_factors: the place of a scale's factor. size: outputs. FACTOR: the inputs that share one; 0: all, and the caller
    multiplies with it. None: there are none.
    """
    scale = tl.load(scales + places, mask=mask, other=0)
    if scale.dtype == tl.uint8:
        scale = widen(scale, "fp8", False, tl.float32) * divisor_of("fp8")
    else:
        scale = scale.to(tl.float32)
    start = tl.zeros(places.shape, tl.float32)
    if STARTS != "none":
        start = tl.load(starts + places, mask=mask, other=0).to(tl.float32)
    elif KIND == "int4":
        start += 8
    if FACTOR is not None and FACTOR > 0:
        scale *= tl.load(factors + of_factors, mask=mask, other=0).to(tl.float32)
        if STARTS == "minima":
            start *= tl.load(factors + of_factors + size, mask=mask, other=0).to(tl.float32)
    return scale, start


@triton.jit
def _load_next(
    scales, starts, factors, column, columns, size, outputs, real,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    """Load the group of a column, or of the last one. GROUP: 0 if a row has one scale."""
    column = min(column, columns - 1)
    group = 0 if GROUP == 0 else column // GROUP
    of_factors = outputs
    if FACTOR is not None and FACTOR > 0:
        of_factors = outputs + column // FACTOR * (2 if STARTS == "minima" else 1) * size
    return load_group(scales, starts, factors, group * size + outputs, of_factors, size, real, KIND, STARTS, FACTOR)


@triton.jit
def _subtract(stored, start, KIND: tl.constexpr, STARTS: tl.constexpr, HIGH: tl.constexpr, TYPE: tl.constexpr):
    """Return numbers less their zeros, exactly."""
    numbers = widen(stored, KIND, HIGH, TYPE)
    if KIND == "int4":
        zero = tl.zeros(start.shape, tl.float32) if STARTS == "minima" else start
        numbers -= (zero + offset_of(TYPE)).to(TYPE)[:, None]
    return numbers


@triton.jit
def _sum_inputs(inputs, are_rows, BYTES: tl.constexpr, OUTPUTS: tl.constexpr):
    """Return the sum of each row's inputs, once for each output: their product with ones.

    This product needs another layout of the inputs. So they are loaded again, from the cache and in another way, or
    else the compiler would join both loads, and copy nothing ahead.
    """
    values = tl.load(inputs, mask=are_rows[None, :], other=0.0, eviction_policy="evict_last")
    return tl.dot(tl.full([OUTPUTS, BYTES], 1.0, values.dtype), values, input_precision="ieee")


@triton.jit
def sum_products(
    lines, inputs, scales, starts, factors, outputs, real, are_rows, size, columns, first, last,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr, BYTES: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """Return the products (OUTPUTS, ROWS) of blocks of inputs, from `first` on, in float32.

    lines, inputs: addresses of the first blocks of weights (OUTPUTS, bytes) and rows (numbers, ROWS). outputs: their
    columns in scales, starts and factors, which have `size` of these.
    """
    TYPE: tl.constexpr = inputs.dtype.element_ty
    OF_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    COLUMNS: tl.constexpr = BYTES * OF_BYTE
    sums = tl.zeros([OUTPUTS, ROWS], tl.float32)
    scale, start = _load_next(
        scales, starts, factors, first * COLUMNS, columns, size, outputs, real, GROUP, FACTOR, KIND, STARTS
    )
    for block in range(first, last):
        stored = tl.load(lines + block * BYTES, mask=real[:, None], other=0)
        # Scales are loaded while the numbers before them are multiplied.
        if GROUP == 0 or GROUP >= COLUMNS:
            next_scale, next_start = _load_next(
                scales, starts, factors, (block + 1) * COLUMNS, columns, size, outputs, real,
                GROUP, FACTOR, KIND, STARTS,
            )  # fmt: skip
            part = tl.zeros([OUTPUTS, ROWS], tl.float32) if GROUP > 0 else sums
            for high in tl.static_range(OF_BYTE):
                values = tl.load(inputs + block * COLUMNS + high * BYTES, mask=are_rows[None, :], other=0.0)
                numbers = _subtract(stored, start, KIND, STARTS, high == 1, TYPE)
                part = tl.dot(numbers, values, part, input_precision="ieee")
                if STARTS == "minima":
                    sums -= (
                        _sum_inputs(inputs + block * COLUMNS + high * BYTES, are_rows, BYTES, OUTPUTS) * start[:, None]
                    )
            sums = sums + part * scale[:, None] if GROUP > 0 else part
            scale, start = next_scale, next_start
        else:
            for high in tl.static_range(OF_BYTE):
                begin = block * COLUMNS + high * BYTES
                next_scale, next_start = _load_next(
                    scales, starts, factors, begin + BYTES, columns, size, outputs, real, GROUP, FACTOR, KIND, STARTS
                )
                values = tl.load(inputs + begin, mask=are_rows[None, :], other=0.0)
                numbers = _subtract(stored, start, KIND, STARTS, high == 1, TYPE)
                sums += tl.dot(numbers, values, input_precision="ieee") * scale[:, None]
                if STARTS == "minima":
                    sums -= _sum_inputs(inputs + begin, are_rows, BYTES, OUTPUTS) * start[:, None]
                scale, start = next_scale, next_start
    if GROUP == 0:
        sums *= scale[:, None]
    if FACTOR == 0:
        sums *= tl.load(factors + outputs, mask=real, other=0.0).to(tl.float32)[:, None]
    if KIND == "fp8" or KIND == "fp4":
        sums *= divisor_of(KIND)
    return sums


@triton.jit(do_not_specialize=["num_rows", "blocks_each"])
def _multiply_packed(
    x, numbers, scales, starts, factors, bias, residual, out,
    num_rows, size, columns, width, blocks_each,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr, BYTES: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IS_PART: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, are_rows = outputs < size, rows < num_rows
    each = tl.arange(0, BYTES)
    lines = numbers + outputs.to(tl.int64)[:, None] * width + each[None, :]
    inputs = x + rows.to(tl.int64)[None, :] * columns + each[:, None]
    first = tl.program_id(2) * blocks_each
    last = min(first + blocks_each, width // BYTES)
    sums = sum_products(
        lines, inputs, scales, starts, factors, outputs, real, are_rows, size, columns, first, last,
        GROUP, FACTOR, KIND, STARTS, BYTES, ROWS, OUTPUTS,
    )  # fmt: skip
    places = rows.to(tl.int64)[None, :] * size + outputs[:, None]
    inside = real[:, None] & are_rows[None, :]
    if IS_PART:
        places += tl.program_id(2).to(tl.int64) * num_rows * size
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=real, other=0.0).to(tl.float32)[:, None]
    if HAS_RESIDUAL:
        sums += tl.load(residual + places, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_parts", "count"])
def _join_parts(
    parts, bias, residual, out, num_parts, count, size,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = places < count
    sums = tl.zeros([BLOCK], tl.float32)
    for part in range(num_parts):
        sums += tl.load(parts + part * count + places, mask=real, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + places % size, mask=real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        sums += tl.load(residual + places, mask=real, other=0.0).to(tl.float32)
    tl.store(out + places, sums.to(out.dtype.element_ty), mask=real)


@triton.jit
def _restore(
    numbers, scales, starts, factors, out, first, count, size, columns, width,
    GROUP: tl.constexpr, FACTOR: tl.constexpr, KIND: tl.constexpr, STARTS: tl.constexpr, BYTES: tl.constexpr,
    OUTPUTS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    OF_BYTE: tl.constexpr = 2 if KIND == "int4" or KIND == "fp4" else 1
    rows = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    outputs = first + rows
    places = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = (rows < count)[:, None] & (places < width)[None, :]
    stored = tl.load(numbers + outputs.to(tl.int64)[:, None] * width + places[None, :], mask=inside, other=0)
    for high in tl.static_range(OF_BYTE):
        inputs = places // BYTES * (BYTES * OF_BYTE) + places % BYTES + high * BYTES
        groups = (inputs * 0 if GROUP == 0 else inputs // GROUP)[None, :] * size + outputs[:, None]
        of_factors = groups * 0 + outputs[:, None]
        if FACTOR is not None and FACTOR > 0:
            of_factors += (inputs // FACTOR * (2 if STARTS == "minima" else 1) * size)[None, :]
        scale, start = load_group(scales, starts, factors, groups, of_factors, size, inside, KIND, STARTS, FACTOR)
        weights = widen(stored, KIND, high == 1, tl.float32)
        weights = weights * scale - start if STARTS == "minima" else (weights - start) * scale
        if FACTOR == 0:
            weights *= tl.load(factors + of_factors, mask=inside, other=0.0).to(tl.float32)
        weights *= divisor_of(KIND)
        restored = out + rows.to(tl.int64)[:, None] * columns + inputs[None, :]
        tl.store(restored, weights.to(out.dtype.element_ty), mask=inside)


def multiply(
    x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x (rows, in) @ weights^T + bias (out,) + residual (rows, out), rounded once."""
    if not len(x):
        return x.new_empty((0, weights.out_features))
    x = x.contiguous() if weights.order is None else x.index_select(1, weights.order)
    residual = None if residual is None else residual.contiguous()
    run = _multiply_few if len(x) <= _MOST_ROWS else _multiply_many
    return run(x, weights, bias, residual)


def _multiply_few(
    x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    (num_rows, columns), size = x.shape, weights.out_features
    assert columns == weights.in_features
    rows, outputs, num_warps = _choose_tile(num_rows, weights)
    tiles = triton.cdiv(size, outputs), triton.cdiv(num_rows, rows)
    width = weights.numbers.shape[1]
    blocks = width // weights.pair
    # The parts, in float32, must not be larger than the weights.
    parts = min(_PROGRAMS // (tiles[0] * tiles[1]), blocks // _LEAST_BLOCKS, width // (8 * rows))
    each = triton.cdiv(blocks, max(1, parts))
    parts = triton.cdiv(blocks, each)
    out = x.new_empty((num_rows, size))
    sums = out if parts == 1 else x.new_empty((parts, num_rows, size), dtype=torch.float32)
    added = (bias, residual) if parts == 1 else (None, None)
    _multiply_packed[(*tiles, parts)](
        x, *list_tensors(weights), *added, sums, num_rows, size, columns, width, each,
        **name_form(weights),
        HAS_BIAS=added[0] is not None, HAS_RESIDUAL=added[1] is not None, IS_PART=parts > 1,
        ROWS=rows, OUTPUTS=outputs, num_warps=num_warps, num_stages=NUM_STAGES,
    )  # fmt: skip
    if parts > 1:
        _join_parts[(triton.cdiv(out.numel(), _JOINED),)](
            sums, bias, residual, out, parts, out.numel(), size,
            HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, BLOCK=_JOINED,
        )  # fmt: skip
    return out


def _choose_tile(num_rows: int, weights: Weights) -> tuple[int, int, int]:
    has_minima = weights.starts is not None and weights.starts.dtype == torch.int8
    tiles = (_TILE_WITH_MINIMA, *_TILES[1:]) if has_minima and not has_warp_groups() else _TILES
    return next((tile for tile in tiles if num_rows <= tile[0]), tiles[-1])


def list_tensors(weights: Weights) -> tuple[torch.Tensor | None, ...]:
    """Return the kernels' arguments for weights."""
    return weights.numbers, weights.scales, weights.starts, weights.factors


def name_form(weights: Weights) -> dict[str, Any]:
    """Return the kernels' constants for weights.

    GROUP: 0 if all inputs of a row share one scale. FACTOR: 0 if they share one factor, of scales alone.
    """
    starts, factors = weights.starts, weights.factors
    return {
        "GROUP": 0 if len(weights.scales) == 1 else weights.group,
        "FACTOR": None
        if factors is None
        else 0
        if factors.shape[:2] == (1, 1)
        else weights.in_features // len(factors),
        "KIND": weights.kind,
        "STARTS": "none" if starts is None else "minima" if starts.dtype == torch.int8 else "zeros",
        "BYTES": weights.pair,
    }


def _multiply_many(
    x: torch.Tensor, weights: Weights, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    size, columns = weights.out_features, weights.in_features
    count = min(size, max(1, _RESTORED // columns))
    restored, out = x.new_empty((count, columns)), x.new_empty((len(x), size))
    added = residual if bias is None else bias if residual is None else residual + bias
    for first in range(0, size, count):
        part = restore(weights, x.dtype, first, restored[: size - first])
        of_part = out[:, first : first + len(part)]
        if added is None:
            torch.mm(x, part.t(), out=of_part)
        else:
            torch.addmm(added[..., first : first + len(part)], x, part.t(), out=of_part)
    return out


def restore(weights: Weights, dtype: torch.dtype, first: int = 0, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return the plain matrix (out, in), or write its rows from `first` on to `out`. Columns stay in their order."""
    columns = weights.in_features
    if out is None:
        out = torch.empty((weights.out_features, columns), dtype=dtype, device=weights.numbers.device)
    width = weights.numbers.shape[1]
    grid = triton.cdiv(len(out), _OUTPUTS), triton.cdiv(width, _RESTORED_BYTES)
    _restore[grid](
        *list_tensors(weights), out, first, len(out), weights.out_features, columns, width,
        **name_form(weights), OUTPUTS=_OUTPUTS, AT_ONCE=_RESTORED_BYTES,
    )  # fmt: skip
    return out
