"""Computes attention over a paged KV cache. One kernel serves decodes, prompts and chunks of prompts.

It is causal, except for tokens of prompts that see later ones (`Ends`).

Each program computes one KV head for a tile of BLOCK_M rows. The rows are all query heads of that KV head for a few
query tokens (GQA packing). So keys and values are read once for the whole group, and tl.dot has its 16 rows even in
decodes. The softmax is online (FlashAttention-2, Dao 2023, algorithm 1).

The grid depends only on the numbers of tokens and sequences. A program of a prompt finds its sequence by bisection, and
returns if it has no work. The keys of long decodes are divided among programs (Flash-Decoding, Dao et al. 2023), see
`decode_plan`. The last program of a row joins the results of all, always in the same order, so no second launch is
needed.

Triton pipelines the loads: it loads the next tiles of keys and values while one is multiplied. For this, an address
must not depend on a load of the same iteration. So the block table is read one iteration ahead.

8-bit keys and values (`slot_cache`) are read in pairs, as numbers of 16 bits: `ldmatrix` transposes only these. Each
product then has two parts, for the first and for the second numbers of the pairs. They are computed in float16, to
which 8 bits are converted with the fewest instructions (`pairs`). The scales of keys are applied to the scores, those
of values to the probabilities before the second product. A prompt reads only the keys and values of earlier steps from
such a cache. Those of its own step are in tensors, as they were before they were rounded (ADR 200).
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import math

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.attention_results import join_shares, store_out
from conveyor_engine.execution.kernels.attention_tiles import MIN_ROWS, choose_tile
from conveyor_engine.execution.kernels.decode_plan import DecodePlan
from conveyor_engine.execution.kernels.pairs import convert_pairs
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.slot_cache import SlotCache

_LOG2_E = tl.constexpr(math.log2(math.e))
# A probability times the scale of its value, in float16, gets this factor: small ones then keep more of their digits.
# The largest scale that does not overflow is 4,094.
_LIFT = tl.constexpr(16.0)


@triton.jit
def _find_sequence(query_start, tile, num_seqs, first_token, BLOCK_Q: tl.constexpr):
    """Return the sequence to which the tile belongs. Sequence s begins at tile start(s) // BLOCK_Q + s."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        begins = (tl.load(query_start + middle) - first_token) // BLOCK_Q + middle
        if begins <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


# Values that differ between steps must not be part of a kernel's specialisation, or Triton compiles again while
# requests wait. Such values are the counts, and the alignment of tensors that are sliced at the number of decodes.
@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "block_tables", "partial_sum", "ends"],
)
def _attend(
    out, work, arrived, partial_out, partial_highest, partial_sum,
    query, key_cache, value_cache, key_scales, value_scales, query_start, seq_lens, block_tables, sinks,
    ends, exact_keys, exact_values, scale, softcap,
    query_token_stride, query_head_stride, table_stride, scales_stride, num_seqs,
    exact_key_stride, exact_key_head_stride, exact_value_stride, exact_value_head_stride,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    LARGEST: tl.constexpr, PRODUCT: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_ENDS: tl.constexpr, HAS_EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Heads come first: programs that run together then read neighbouring memory. The grid has one axis, because the
    # others are limited to 65,535 programs.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    tile = tl.program_id(0) // NUM_KV_HEADS
    num_tiles = tl.num_programs(0) // NUM_KV_HEADS
    if DECODE:  # decodes are the first rows of the batch and have one query each
        seq = tl.load(work + tile)
        if seq < 0:
            return
        seq_len = tl.load(work + num_tiles + tile)
        first_share = tl.load(work + 4 * num_tiles + tile)
        num_shares = tl.load(work + 5 * num_tiles + tile)
        start, num_queries, first_query = seq, 1, 0
    else:
        tile = num_tiles - 1 - tile  # the last tiles of a prompt see the most keys, so they begin first
        first_of_all = tl.load(query_start)
        seq = _find_sequence(query_start, tile, num_seqs, first_of_all, BLOCK_Q)
        start = tl.load(query_start + seq)
        num_queries = tl.load(query_start + seq + 1) - start
        first_query = (tile - ((start - first_of_all) // BLOCK_Q + seq)) * BLOCK_Q
        if first_query >= num_queries:
            return
        seq_len = tl.load(seq_lens + seq)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP  # indices within the sequence
    heads = kv_head * GROUP + rows % GROUP
    real_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries)
    tokens = (start + queries).to(tl.int64)
    positions = seq_len - num_queries + queries
    seen_before = positions + 1
    if HAS_ENDS and not DECODE:
        seen_before = tl.load(ends + tokens, mask=real_row, other=0)
    dims = tl.arange(0, DIM_PADDED)
    value_dims = tl.arange(0, VALUE_PADDED)
    places = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    q = tl.load(places, mask=real_row[:, None] & (dims[None, :] < DIM), other=0.0)

    if DECODE:  # this program's share of the keys
        begin = tl.load(work + 2 * num_tiles + tile)
        bounds = (begin, begin, begin, tl.load(work + 3 * num_tiles + tile))
    else:  # the keys that at least one row of the tile sees
        last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
        after_last = seq_len - num_queries + last_query + 1
        end, first_end = after_last, seq_len - num_queries + first_query + 1
        if HAS_ENDS:
            end, first_end = tl.load(ends + start + last_query), tl.load(ends + start + first_query)
        context = seq_len - num_queries
        first_seen, seen_by_all = context + first_query - WINDOW + 1, after_last - WINDOW
        bounds = _find_bounds(context if HAS_EXACT else 0, first_seen, seen_by_all, first_end, end, WINDOW, BLOCK_N)

    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    if HAS_SINKS:  # a head's first score, without a value; of a divided row, the first share has it
        highest = tl.load(sinks + heads).to(tl.float32) * _LOG2_E
        if DECODE:
            highest = tl.where(tile == first_share, highest, float("-inf"))
        total = tl.where(highest == float("-inf"), 0.0, 1.0)
    table = block_tables + seq.to(tl.int64) * table_stride
    if LARGEST > 0:  # the cache has 8 bits; `scale` includes 1 / LARGEST
        key_scales += kv_head.to(tl.int64) * scales_stride
        value_scales += kv_head.to(tl.int64) * scales_stride
        q, q_second = tl.split(tl.reshape(q.to(PRODUCT), [BLOCK_M, DIM_PADDED // 2, 2]))
        acc = tl.full([BLOCK_M, VALUE_PADDED // 2], 0.0, tl.float32)
        acc_second = acc
    else:
        acc = tl.full([BLOCK_M, VALUE_PADDED], 0.0, tl.float32)
        q_second, acc_second = q, acc  # unused
    state = (acc, acc_second, total, highest)
    cache = (key_cache, value_cache, key_scales, value_scales, table, kv_head, 0, 0)
    if HAS_EXACT:
        cached = _find_bounds(0, first_seen, seen_by_all, context, context, WINDOW, BLOCK_N)
        state = _see_range(
            state, q, q_second, cache, positions, seen_before, cached, scale, softcap, NUM_KV_HEADS, DIM, DIM_PADDED,
            VALUE_DIM, VALUE_PADDED, LARGEST, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N, DECODE, EXACT=False,
        )  # fmt: skip
        acc, acc_second, total, highest = state
        acc = tl.reshape(tl.join(acc, acc_second), [BLOCK_M, VALUE_PADDED]) * (1.0 / (LARGEST * _LIFT))
        q = tl.load(places, mask=real_row[:, None] & (dims[None, :] < DIM), other=0.0)
        first_row = start.to(tl.int64) - context  # where key 0 would be
        keys = exact_keys + kv_head.to(tl.int64) * exact_key_head_stride + first_row * exact_key_stride
        values = exact_values + kv_head.to(tl.int64) * exact_value_head_stride + first_row * exact_value_stride
        exact = (keys, values, key_scales, value_scales, table, kv_head, exact_key_stride, exact_value_stride)
        acc, acc_second, total, highest = _see_range(
            (acc, acc, total, highest), q, q, exact, positions, seen_before, bounds, scale * LARGEST, softcap,
            NUM_KV_HEADS, DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, 0, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N,
            DECODE, EXACT=True,
        )  # fmt: skip
    else:
        acc, acc_second, total, highest = _see_range(
            state, q, q_second, cache, positions, seen_before, bounds, scale, softcap, NUM_KV_HEADS, DIM, DIM_PADDED,
            VALUE_DIM, VALUE_PADDED, LARGEST, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N, DECODE, EXACT=False,
        )  # fmt: skip
        if LARGEST > 0:
            acc = tl.reshape(tl.join(acc, acc_second), [BLOCK_M, VALUE_PADDED]) * (1.0 / (LARGEST * _LIFT))
    real_out = real_row[:, None] & (value_dims[None, :] < VALUE_DIM)
    if DECODE:
        if num_shares > 1:
            row = tile * NUM_HEADS + heads
            tl.store(partial_out + row[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=real_out)
            tl.store(partial_highest + row, highest, mask=real_row)
            tl.store(partial_sum + row, total, mask=real_row)
            tl.debug_barrier()  # all stores of this program's threads must precede its arrival
            counter = arrived + seq * NUM_KV_HEADS + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_shares - 1:
                tl.store(counter, 0)  # reset for the next layer
                acc, total = join_shares(
                    partial_out, partial_highest, partial_sum, first_share, num_shares,
                    heads, value_dims, real_row, real_out, NUM_HEADS, VALUE_DIM,
                )  # fmt: skip
                store_out(out, acc, total, tokens, heads, value_dims, real_out, NUM_HEADS, VALUE_DIM)
        else:
            store_out(out, acc, total, tokens, heads, value_dims, real_out, NUM_HEADS, VALUE_DIM)
    else:
        store_out(out, acc, total, tokens, heads, value_dims, real_out, NUM_HEADS, VALUE_DIM)


@triton.jit
def _find_bounds(origin, first_seen, seen_by_all, whole_end, end, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Divide the keys origin .. end into tiles. Returns where they begin, where all rows see all keys, and the end.

    first_seen: the first key in the window of some row. seen_by_all .. whole_end: the keys that all rows see.
    """
    begin, whole = origin, origin
    if WINDOW > 0:
        begin = origin + tl.maximum(first_seen - origin, 0) // BLOCK_N * BLOCK_N
        whole = tl.minimum(origin + tl.cdiv(tl.maximum(seen_by_all - origin, 0), BLOCK_N) * BLOCK_N, end)
    return begin, whole, tl.maximum(origin + (whole_end - origin) // BLOCK_N * BLOCK_N, whole), end


@triton.jit
def _see_range(
    state, q, q_second, source, positions, seen_before, bounds, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, LARGEST: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, DECODE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the tile's state after attending to the keys within the bounds, with masks only where they are needed."""
    begin, whole_begin, whole_end, end = bounds
    if not DECODE:
        if WINDOW > 0:
            state = _see_keys(
                state, q, q_second, source, positions, seen_before, begin, whole_begin, scale, softcap, NUM_KV_HEADS,
                DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, LARGEST, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N,
                MASKED=True, EXACT=EXACT,
            )  # fmt: skip
        state = _see_keys(
            state, q, q_second, source, positions, seen_before, whole_begin, whole_end, scale, softcap, NUM_KV_HEADS,
            DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, LARGEST, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N,
            MASKED=False, EXACT=EXACT,
        )  # fmt: skip
    return _see_keys(
        state, q, q_second, source, positions, seen_before, whole_end, end, scale, softcap, NUM_KV_HEADS,
        DIM, DIM_PADDED, VALUE_DIM, VALUE_PADDED, LARGEST, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, BLOCK_N,
        MASKED=True, EXACT=EXACT,
    )  # fmt: skip


@triton.jit
def _see_keys(
    state, q, q_second, source, positions, seen_before, begin, end, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr, LARGEST: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return the tile's (acc, acc_second, total, highest) after attending to the keys begin .. end.

    Without MASKED, every row must see all of these keys. Over 8 bits, q and acc have the first dimensions of the pairs,
    q_second and acc_second the second ones. With EXACT, the source is not the cache but one KV head's keys and values
    of the step, with the strides of their tokens.
    """
    acc, acc_second, total, highest = state
    key_cache, value_cache, key_scales, value_scales, table, kv_head, key_stride, value_stride = source
    TOGETHER: tl.constexpr = 2 if LARGEST > 0 else 1  # dimensions that are read as one number
    dims = tl.arange(0, DIM_PADDED // TOGETHER)
    value_dims = tl.arange(0, VALUE_PADDED // TOGETHER)
    block = begin
    if not EXACT:
        next_keys = begin + tl.arange(0, BLOCK_N)
        block = tl.load(table + next_keys // BLOCK_SIZE, mask=next_keys < end, other=0)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        slots = keys
        if EXACT:
            key_rows, value_rows = keys.to(tl.int64) * key_stride, keys.to(tl.int64) * value_stride
        else:
            slots = block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
            row = slots * NUM_KV_HEADS + kv_head
            key_rows, value_rows = row * (DIM // TOGETHER), row * (VALUE_DIM // TOGETHER)
            next_keys = keys + BLOCK_N
            block = tl.load(table + next_keys // BLOCK_SIZE, mask=next_keys < end, other=0)
        real_key = keys < end
        k = _load_tile(
            key_cache + key_rows[None, :] + dims[:, None],
            real_key[None, :] & (dims[:, None] < DIM // TOGETHER), MASKED or DIM < DIM_PADDED,
        )  # fmt: skip
        if LARGEST > 0:
            k, k_second = convert_pairs(k, LARGEST == 127, q.dtype)
            scores = tl.dot(q_second, k_second, tl.dot(q, k, input_precision="ieee"), input_precision="ieee")
            scores *= _load_tile(key_scales + slots, real_key, MASKED)[None, :]
        else:
            scores = tl.dot(q, k, input_precision="ieee")
        if HAS_SOFTCAP:  # tanh(x) = 2 sigmoid(2x) - 1
            scores = (2.0 * tl.sigmoid(2.0 * (scores * scale) / softcap) - 1.0) * softcap * _LOG2_E
        else:
            scores *= scale * _LOG2_E  # exp2 is faster than exp
        if MASKED:
            visible = (keys[None, :] < seen_before[:, None]) & real_key[None, :]
            if WINDOW > 0:
                visible = visible & (keys[None, :] > positions[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        safe = new_highest
        if MASKED:  # rows that have seen no key yet
            safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores - safe[:, None])
        factor = tl.exp2(highest - safe)
        total = total * factor + tl.sum(p, axis=1)
        v = _load_tile(
            value_cache + value_rows[:, None] + value_dims[None, :],
            real_key[:, None] & (value_dims[None, :] < VALUE_DIM // TOGETHER), MASKED or VALUE_DIM < VALUE_PADDED,
        )  # fmt: skip
        acc *= factor[:, None]
        if LARGEST > 0:
            p = (p * (_load_tile(value_scales + slots, real_key, MASKED) * _LIFT)[None, :]).to(q.dtype)
            v, v_second = convert_pairs(v, LARGEST == 127, q.dtype)
            acc_second = tl.dot(p, v_second, acc_second * factor[:, None], input_precision="ieee")
            acc = tl.dot(p, v, acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
        highest = new_highest
    return acc, acc_second, total, highest


@triton.jit
def _load_tile(pointers, real, MASKED: tl.constexpr):
    return tl.load(pointers, mask=real, other=0.0) if MASKED else tl.load(pointers)


def paged_attention(
    query: torch.Tensor,
    caches: tuple[SlotCache, SlotCache],
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    num_queries: int,
    plan: DecodePlan | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    exact: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write attention of the tokens query_start[0] .. query_start[-1] of query (T, H, D) to out (T, H, Dv).

    caches: keys and values, blocks * block_size slots. query_start (B + 1,), seq_lens (B,) and block_tables (B, W) are
    int32. num_queries: query_start[-1] - query_start[0], which the host knows. plan: for decodes, which have one query
    token each and are the first of the batch; None for prompts. sinks: (H,) or None, see `AttentionSpec`. ends: of the
    batch's tokens, see `AttentionMetadata.ends_of`. exact: for prompts over 8 bits, the keys (T, Hkv, D) and values (T,
    Hkv, Dv) of the batch's tokens in the type of `query`; the last dimension is contiguous.
    """
    keys, values = (cache.numbers for cache in caches)
    largest = caches[0].largest
    num_heads, dim = query.shape[1:]
    num_kv_heads, value_dim = values.shape[1:]
    group = num_heads // num_kv_heads
    decode = plan is not None
    tile = choose_tile(decode, max(dim, value_dim), query.itemsize, group, of_8_bits=largest > 0)
    assert tile.rows >= MIN_ROWS
    assert not decode or query_start.storage_offset() == 0
    assert exact is None or (largest > 0 and not decode and all(each.stride(2) == 1 for each in exact))
    tokens_per_tile = tile.rows // group
    num_seqs = seq_lens.shape[0]
    dim_padded, value_padded = (max(32 if largest else 16, triton.next_power_of_2(size)) for size in (dim, value_dim))
    if largest:  # as pairs
        keys, values = keys.view(torch.int16), values.view(torch.int16)
    # Sequence s begins at tile (its first token) // tokens_per_tile + s, so this is an upper bound.
    num_tiles = num_queries // tokens_per_tile + num_seqs if plan is None else plan.work.shape[1]
    _attend[(num_kv_heads * num_tiles,)](
        out, plan and plan.work, plan and plan.arrived,
        plan and plan.partial_out, plan and plan.partial_highest, plan and plan.partial_sum,
        query, keys, values, *(cache.scales for cache in caches), query_start, seq_lens, block_tables, sinks,
        ends, *(exact or (None, None)), scaling / (largest or 1.0), 0.0 if softcap is None else softcap,
        query.stride(0), query.stride(1), block_tables.stride(0), caches[0].scales_stride, num_seqs,
        *(stride for each in exact or () for stride in each.stride()[:2]), *(() if exact else (0, 0, 0, 0)),
        GROUP=group, NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads,
        DIM=dim, DIM_PADDED=dim_padded, VALUE_DIM=value_dim, VALUE_PADDED=value_padded,
        LARGEST=largest, PRODUCT=tl.float32 if query.dtype == torch.float32 else tl.float16,
        BLOCK_SIZE=block_size, WINDOW=sliding_window or 0, HAS_SOFTCAP=softcap is not None,
        HAS_SINKS=sinks is not None, HAS_ENDS=ends is not None, HAS_EXACT=exact is not None,
        BLOCK_M=tile.rows, BLOCK_Q=tokens_per_tile, BLOCK_N=tile.keys, DECODE=decode, **early_launch(),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
