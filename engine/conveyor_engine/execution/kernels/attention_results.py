"""Joins the shares of a decode's keys, and writes the results of attention. Used by `paged_attention` and
`latent_attention`.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import triton
import triton.language as tl


@triton.jit
def join_shares(
    partial_out, partial_highest, partial_sum, first_share, num_shares,
    heads, value_dims, real_row, real_out, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Return (acc, total) of a row, joined from those of its shares. Each share is relative to its own highest score.

    The loads bypass the L1 cache, because other programs have written the data.
    """
    highest = tl.where(real_row, float("-inf"), 0.0)
    total = tl.zeros_like(highest)
    acc = tl.zeros([heads.shape[0], value_dims.shape[0]], tl.float32)
    for share in tl.range(first_share, first_share + num_shares, loop_unroll_factor=4):
        row = share * NUM_HEADS + heads
        part = tl.load(
            partial_out + row[:, None] * VALUE_DIM + value_dims[None, :],
            mask=real_out, other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        its_highest = tl.load(partial_highest + row, mask=real_row, other=0.0, cache_modifier=".cg")
        its_total = tl.load(partial_sum + row, mask=real_row, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, its_highest)
        factor, its_factor = tl.exp2(highest - new_highest), tl.exp2(its_highest - new_highest)
        acc = acc * factor[:, None] + part * its_factor[:, None]
        total = total * factor + its_total * its_factor
        highest = new_highest
    return acc, total


@triton.jit
def store_out(out, acc, total, tokens, heads, value_dims, real_out, NUM_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr):
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]  # rows past the last query may have seen no key
    row = tokens * NUM_HEADS + heads
    tl.store(out + row[:, None] * VALUE_DIM + value_dims[None, :], result.to(out.dtype.element_ty), mask=real_out)
