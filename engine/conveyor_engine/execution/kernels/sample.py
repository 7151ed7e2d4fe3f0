"""Finds each row's best token, or draws one from all tokens. Two kernels read the logits once, and nothing is sorted.

In the first kernel, each program sums the weights of one slice of a row. In the second, one program for each row
chooses a slice, then a token in it. If the row has a floor (min_p), which is relative to the best token, this program
weighs the row's most likely slices again. `sampling.draw` computes the same block by block with torch's operations.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

_SLICE = 4096  # tokens


@triton.jit
def _weigh_slices(
    logits, draws, best, places, sums,
    greedy_below, row_stride,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    values = _load_slice(logits + row * row_stride, part, VOCAB_SIZE, SLICE)
    largest, place = tl.max(values, axis=0, return_indices=True)
    out = row * tl.num_programs(1) + part
    tl.store(best + out, largest)
    tl.store(places + out, part * SLICE + place)
    temperature = tl.load(draws + 2 * row)
    if (temperature >= greedy_below) & _is_finite(largest):
        tl.store(sums + out, tl.sum(_weigh(values, largest, temperature, float("-inf")), axis=0))


@triton.jit
def _choose(
    logits, draws, uniforms, best, places, sums, row_best, tokens,
    greedy_below, below_one, row_stride, num_slices,
    VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr, SLICES_PADDED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slices = tl.arange(0, SLICES_PADDED)
    of_row, real = row * num_slices + slices, slices < num_slices
    largest_of = tl.load(best + of_row, mask=real, other=float("-inf"))
    largest, winner = tl.max(largest_of, axis=0, return_indices=True)
    token = tl.load(places + row * num_slices + winner)
    temperature, floor = tl.load(draws + 2 * row), tl.load(draws + 2 * row + 1)
    if (temperature >= greedy_below) & _is_finite(largest):
        weights = _weigh(largest_of, largest, temperature, floor)
        if floor > float("-inf"):
            for each in range(num_slices):
                if tl.sum(tl.where(slices == each, weights, 0.0), axis=0) > 0:
                    values = _load_slice(logits + row * row_stride, each, VOCAB_SIZE, SLICE)
                    inner = _weigh(values, largest, temperature, floor)
                    weights = tl.where(slices == each, tl.sum(inner, axis=0), weights)
        else:
            weights *= tl.load(sums + of_row, mask=_is_finite(largest_of), other=0.0)
        ends = tl.cumsum(weights, axis=0)
        target = tl.load(uniforms + row) * tl.max(ends, axis=0) * below_one
        part = _find_passed(weights, ends, target)
        target -= tl.sum(tl.where(slices == part, ends - weights, 0.0), axis=0)  # the weight of the earlier slices
        chosen = _weigh(_load_slice(logits + row * row_stride, part, VOCAB_SIZE, SLICE), largest, temperature, floor)
        token = part * SLICE + _find_passed(chosen, tl.cumsum(chosen, axis=0), target)
    tl.store(row_best + row, largest)
    tl.store(tokens + row, token.to(tl.int64))


@triton.jit
def _load_slice(row, part, VOCAB_SIZE: tl.constexpr, SLICE: tl.constexpr):
    """Load one slice of a row as float32. NaN becomes infinity, so that it is the largest."""
    columns = part * SLICE + tl.arange(0, SLICE)
    values = tl.load(row + columns, mask=columns < VOCAB_SIZE, other=float("-inf")).to(tl.float32)
    return tl.where(values == values, values, float("inf"))


@triton.jit
def _find_passed(weights, ends, target):
    """Return the index of the first weight whose end is above the target, like `sampling.draw._find_passed`.

    The ends of a parallel sum may decrease, and may increase where a weight is 0.
    """
    ends = tl.where(weights > 0, ends, float("-inf"))
    passed = (ends > target) | (ends == tl.max(ends, axis=0))
    return tl.min(tl.where(passed, tl.arange(0, ends.shape[0]), ends.shape[0]), axis=0)


@triton.jit
def _is_finite(value):
    return tl.abs(value) < float("inf")


@triton.jit
def _weigh(values, largest, temperature, floor):
    """Return the weight of each logit: 1 for the largest, 0 below the floor."""
    relative = (values - largest) / temperature
    return tl.where(relative < floor, 0.0, tl.exp(relative))


def sample(
    logits: torch.Tensor, draws: torch.Tensor, uniforms: torch.Tensor, greedy_below: float, below_one: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `native.sample`, on CUDA."""
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    num_slices = triton.cdiv(vocab_size, _SLICE)
    best = logits.new_empty((rows, num_slices), dtype=torch.float32)
    sums = torch.empty_like(best)  # not shared with another tensor: a different alignment would compile another kernel
    places = logits.new_empty((rows, num_slices), dtype=torch.int32)
    row_best = logits.new_empty(rows, dtype=torch.float32)
    tokens = logits.new_empty(rows, dtype=torch.int64)
    _weigh_slices[(rows, num_slices)](
        logits, draws, best, places, sums, greedy_below, logits.stride(0),
        VOCAB_SIZE=vocab_size, SLICE=_SLICE,
    )  # fmt: skip
    _choose[(rows,)](
        logits, draws, uniforms, best, places, sums, row_best, tokens,
        greedy_below, below_one, logits.stride(0), num_slices,
        VOCAB_SIZE=vocab_size, SLICE=_SLICE, SLICES_PADDED=triton.next_power_of_2(num_slices),
    )  # fmt: skip
    return row_best, tokens
