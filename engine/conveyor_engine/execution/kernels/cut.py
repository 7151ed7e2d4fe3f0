"""Draws a token for each row that has top_k or top_p. Does not sort and never waits for the host.

One program for each row finds the smallest logit that is kept. It narrows an interval of logits: each pass over the row
compares the logits with four pivots and sums the tokens at or above each pivot (their number for top_k, their weights
for top_p). As soon as few tokens are left, the program collects them and continues in registers. All tokens with the
smallest kept logit are kept. On a CPU, the torch operations of `sampling.cuts` compute the same, except for such equal
tokens.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.sample import _find_passed, _is_finite

_SLICE = 4096  # tokens that a program reads at once, and the maximum that it collects
_WIDTH = tl.constexpr(8)  # tokens of a slice that one thread sums up before it adds them to its total
_WEIGHTLESS = tl.constexpr(104.0)  # exp(-104) is 0 in float32
_FIRST_LOOK = tl.constexpr(16.0)  # the first pivots lie up to 16 temperatures below the best logit
_LARGEST_FLOAT = tl.constexpr(3.4028234e38)
_LOG2_E = tl.constexpr(1.4426950408889634)
_KEY_SHIFTS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}  # low bits of float32 that the type lacks


@triton.jit
def _cut(
    logits, draws, uniforms, best, collected, tokens,
    greedy_below, below_one, row_stride,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, SLICES_PADDED: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest = tl.load(best + row)
    temperature = tl.load(draws + 4 * row)
    if (temperature >= greedy_below) & _is_finite(largest):
        floor, top_k, top_p = tl.load(draws + 4 * row + 1), tl.load(draws + 4 * row + 2), tl.load(draws + 4 * row + 3)
        uniform = tl.load(uniforms + row) * below_one
        logits += row * row_stride
        scale = _LOG2_E / temperature
        first_look = largest - temperature * _FIRST_LOOK
        lowest = tl.maximum(largest + temperature * tl.maximum(floor, -_WEIGHTLESS), -_LARGEST_FLOAT)
        least = _key(lowest, SHIFT)
        least = tl.where(_value(least, SHIFT) < lowest, least + 1, least)  # the key of the smallest logit >= lowest
        few = tl.full([], False, tl.int1)
        needed = tl.full([], -1.0, tl.float32)  # the weight that the kept tokens must have; -1: not known yet
        if top_k < VOCAB_SIZE:
            least, few, _ = _narrow(logits, largest, scale, least, first_look, top_k, True, VOCAB_SIZE, SLICE, SHIFT)
        if (top_p < 1) & (few == 0):
            least, few, needed = _narrow(
                logits, largest, scale, least, first_look, top_p, False, VOCAB_SIZE, SLICE, SHIFT
            )
        if few:
            token = _draw_from_few(
                logits, collected + row * SLICE, largest, scale, least, top_k, top_p, needed, uniform,
                VOCAB_SIZE, SLICE, SHIFT,
            )  # fmt: skip
        else:
            token = _draw_from_many(
                logits, largest, scale, _value(least, SHIFT), uniform, VOCAB_SIZE, SLICE, SLICES_PADDED
            )
        tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _narrow(
    row, largest, scale, least, first_look, wanted,
    COUNTS: tl.constexpr, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Return (the key of the smallest kept logit, whether few tokens are left, the sum that the kept tokens must
    reach).

    The result is the key of the largest logit whose tokens at or above it reach `wanted`: a number of tokens (COUNTS),
    or a share of the weight of all tokens from `least` on. If few tokens are left earlier, the search ends with a
    smaller key.
    """
    end = _key(largest, SHIFT) + 1
    few = tl.full([], False, tl.int1)  # whether all tokens at or above `least` fit into a slice
    needed = tl.full([], -1.0, tl.float32)
    begin = tl.maximum(_value(least, SHIFT), first_look)
    sum_at_least = tl.full([], float("inf"), tl.float32)
    while (least + 1 < end) & (few == 0):
        quarter = (_value(end - 1, SHIFT) - begin) / 4
        a = tl.where(needed < 0, least, _middle(least, end))  # bisects the keys: ends for any logits
        b = _pivot(begin + quarter, least, end, SHIFT)
        c = _pivot(begin + 2 * quarter, least, end, SHIFT)
        d = _pivot(begin + 3 * quarter, least, end, SHIFT)
        number, sum_a, sum_b, sum_c, sum_d = _measure(
            row, largest, scale, _value(least, SHIFT),
            _value(a, SHIFT), _value(b, SHIFT), _value(c, SHIFT), _value(d, SHIFT),
            COUNTS, VOCAB_SIZE, SLICE,
        )  # fmt: skip
        needed = tl.where(needed < 0, tl.minimum(wanted, sum_a) if COUNTS else wanted * sum_a, needed)
        least, end, sum_at_least = _tighten(least, end, sum_at_least, a, sum_a, needed)
        least, end, sum_at_least = _tighten(least, end, sum_at_least, b, sum_b, needed)
        least, end, sum_at_least = _tighten(least, end, sum_at_least, c, sum_c, needed)
        least, end, sum_at_least = _tighten(least, end, sum_at_least, d, sum_d, needed)
        begin = _value(least, SHIFT)
        few = (sum_at_least if COUNTS else number) <= SLICE
    return least, few, needed


@triton.jit
def _measure(
    row, largest, scale, least, a, b, c, d,
    COUNTS: tl.constexpr, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """Return the number of tokens >= `least`, and the sums of the tokens at or above the pivots a, b, c and d.

    The number is 0 if the sums are counts themselves (COUNTS). All sums are added in one order, so that a higher pivot
    never has a larger sum.
    """
    sums_a = tl.zeros([SLICE // _WIDTH], tl.float32)
    numbers, sums_b, sums_c, sums_d = sums_a, sums_a, sums_a, sums_a
    for part in tl.range(0, tl.cdiv(VOCAB_SIZE, SLICE), num_stages=2):
        values = _load(row, part, VOCAB_SIZE, SLICE)
        weights = tl.full([SLICE], 1.0, tl.float32) if COUNTS else _weigh(values, largest, scale)
        if not COUNTS:
            numbers += _fold(tl.where(values >= least, 1.0, 0.0))
        sums_a += _fold(tl.where(values >= a, weights, 0.0))
        sums_b += _fold(tl.where(values >= b, weights, 0.0))
        sums_c += _fold(tl.where(values >= c, weights, 0.0))
        sums_d += _fold(tl.where(values - d >= 0, weights, 0.0))  # four equal forms would be packed bitwise on sm_90
    return (
        tl.sum(numbers, axis=0),
        tl.sum(sums_a, axis=0),
        tl.sum(sums_b, axis=0),
        tl.sum(sums_c, axis=0),
        tl.sum(sums_d, axis=0),
    )


@triton.jit
def _fold(values):
    """Sum the tokens of each thread, values (SLICE,) -> (SLICE / _WIDTH,), so that threads wait for each other only at
    the end of the row."""
    return tl.sum(tl.reshape(values, [values.shape[0] // _WIDTH, _WIDTH]), axis=1)


@triton.jit
def _tighten(least, end, sum_at_least, pivot, reached, needed):
    enough = reached >= needed
    return (
        tl.where(enough, tl.maximum(least, pivot), least),
        tl.where(enough, end, tl.minimum(end, pivot)),
        tl.where(enough, tl.minimum(sum_at_least, reached), sum_at_least),
    )


@triton.jit
def _draw_from_few(
    row, collected, largest, scale, least, top_k, top_p, needed, uniform,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Apply both cuts to the tokens at or above `least`, at most a slice of them, and draw one of the kept tokens."""
    threshold = _value(least, SHIFT)
    places = tl.arange(0, SLICE)
    count = tl.zeros([], tl.int32)
    for part in range(tl.cdiv(VOCAB_SIZE, SLICE)):
        inside = _load(row, part, VOCAB_SIZE, SLICE) >= threshold
        number = inside.to(tl.int32)
        to = count + tl.cumsum(number, axis=0) - number
        tl.store(collected + to, part * SLICE + places, mask=inside & (to < SLICE))
        count += tl.sum(number, axis=0)
    tl.debug_barrier()  # the loads below read what other threads of this program stored
    token_ids = tl.load(collected + places, mask=places < count, other=0)
    values = tl.load(row + token_ids, mask=places < count, other=float("-inf")).to(tl.float32)
    end = _key(largest, SHIFT) + 1
    if top_k < count:
        least = _bisect(values, tl.where(places < count, 1.0, 0.0), least, end, top_k, SHIFT)
    weights = tl.where(values >= _value(least, SHIFT), _weigh(values, largest, scale), 0.0)
    if top_p < 1:
        needed = tl.where(needed < 0, top_p * tl.sum(weights, axis=0), needed)
        least = _bisect(values, weights, least, end, needed, SHIFT)
        weights = tl.where(values >= _value(least, SHIFT), weights, 0.0)
    ends = tl.cumsum(weights, axis=0)
    return tl.load(collected + _find_passed(weights, ends, uniform * tl.max(ends, axis=0)))


@triton.jit
def _bisect(values, weights, least, end, needed, SHIFT: tl.constexpr):
    """Return the key of the largest logit whose weights at or above it reach `needed`. Those from `least` on must reach
    it."""
    while least + 1 < end:
        pivot = _middle(least, end)
        enough = tl.sum(tl.where(values >= _value(pivot, SHIFT), weights, 0.0), axis=0) >= needed
        least, end = tl.where(enough, pivot, least), tl.where(enough, end, pivot)
    return least


@triton.jit
def _draw_from_many(
    row, largest, scale, threshold, uniform,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, SLICES_PADDED: tl.constexpr,
):  # fmt: skip
    """Draw one of the tokens at or above the threshold: first a slice, then a token in it."""
    slices = tl.arange(0, SLICES_PADDED)
    sums = tl.zeros([SLICES_PADDED], tl.float32)
    for part in range(tl.cdiv(VOCAB_SIZE, SLICE)):
        values = _load(row, part, VOCAB_SIZE, SLICE)
        weights = tl.where(values >= threshold, _weigh(values, largest, scale), 0.0)
        sums = tl.where(slices == part, tl.sum(weights, axis=0), sums)
    ends = tl.cumsum(sums, axis=0)
    target = uniform * tl.max(ends, axis=0)
    part = _find_passed(sums, ends, target)
    target -= tl.sum(tl.where(slices == part, ends - sums, 0.0), axis=0)  # the weight of the earlier slices
    values = _load(row, part, VOCAB_SIZE, SLICE)
    weights = tl.where(values >= threshold, _weigh(values, largest, scale), 0.0)
    return part * SLICE + _find_passed(weights, tl.cumsum(weights, axis=0), target)


@triton.jit
def _load(row, part, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr):
    """Load one slice of a row as float32. The caller does not draw from rows that contain NaN."""
    columns = part * SLICE + tl.arange(0, SLICE)
    return tl.load(row + columns, mask=columns < VOCAB_SIZE, other=float("-inf")).to(tl.float32)


@triton.jit
def _weigh(values, largest, scale):
    """Return the weight of each logit. The largest logit has weight 1."""
    return tl.exp2((values - largest) * scale)


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """Return an int32 key that orders like the logit. Neighbouring numbers of its type have neighbouring keys."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """Return the float32 value that has this key."""
    wide = key << SHIFT
    bits = tl.where(key < 0, (wide | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, wide)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _middle(least, end):
    """Return the middle of both without adding them, because their sum may overflow an int32."""
    return (least >> 1) + (end >> 1) + (least & end & 1)


@triton.jit
def _pivot(value, least, end, SHIFT: tl.constexpr):
    """Return the key of the value, clamped between `least` and `end`, both excluded."""
    return tl.minimum(tl.maximum(_key(value, SHIFT), least + 1), end - 1)


def cut(
    logits: torch.Tensor,
    draws: torch.Tensor,
    uniforms: torch.Tensor,
    best: torch.Tensor,
    tokens: torch.Tensor,
    greedy_below: float,
    below_one: float,
) -> None:
    """Draw tokens for rows with cuts, on CUDA, and write them into `tokens`, int64 (rows,). Other rows stay unchanged.

    logits (rows, vocabulary). draws, float32 (rows, 4): the row's temperature (a row below `greedy_below` has no cuts),
    its floor as in `sample`, top_k (the vocabulary's size if off) and top_p. uniforms, float32 (rows, 1). best, float32
    (rows,): the row's largest logit. Rows whose largest logit is not finite stay unchanged.
    """
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    _cut[(rows,)](
        logits, draws, uniforms, best, logits.new_empty((rows, _SLICE), dtype=torch.int32), tokens,
        greedy_below, below_one, logits.stride(0),
        VOCAB_SIZE=vocab_size, SLICE=_SLICE, SLICES_PADDED=triton.next_power_of_2(triton.cdiv(vocab_size, _SLICE)),
        SHIFT=_KEY_SHIFTS[logits.dtype],
        num_warps=8,
    )  # fmt: skip


def scratch_bytes(rows: int) -> int:
    """Return the bytes of temporary memory that one call of `cut` with this number of rows needs."""
    return rows * _SLICE * 4
