"""Computes attention over a paged cache of latents: one KV head, whose values are the first numbers of its keys.

A program computes a few query heads, for one token or for several tokens of a prompt. It reads each tile of keys once,
for both products: the scores need the tile transposed, and the values as it is. The numbers behind the values (the
rotary keys) are a second, narrow tile, because a tile's width is a power of two: 512 and 64, not 1,024.

Sequences, shares of decodes and 8-bit keys are handled as in `paged_attention`.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.attention_results import join_shares, store_out
from conveyor_engine.execution.kernels.decode_plan import DecodePlan
from conveyor_engine.execution.kernels.paged_attention import _find_sequence
from conveyor_engine.execution.kernels.pairs import convert_pairs
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.slot_cache import SlotCache

_LOG2_E = tl.constexpr(math.log2(math.e))
_LIFT = tl.constexpr(16.0)  # as in `paged_attention`
WIDEST = 512  # numbers of a value; wider ones do not fit into a program's registers
_MOST_HEADS = 16  # of a program


@triton.jit(
    do_not_specialize=["num_seqs", "table_stride"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "block_tables", "partial_sum"],
)
def _attend_latents(
    out, work, arrived, partial_out, partial_highest, partial_sum,
    query, cache, scales, query_start, seq_lens, block_tables,
    scale, query_token_stride, query_head_stride, table_stride, num_seqs,
    GROUP: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_PARTS: tl.constexpr,
    DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, REST_PADDED: tl.constexpr,
    LARGEST: tl.constexpr, PRODUCT: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    DECODE: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0) % NUM_PARTS  # of the heads
    tile = tl.program_id(0) // NUM_PARTS
    num_tiles = tl.num_programs(0) // NUM_PARTS
    if DECODE:
        seq = tl.load(work + tile)
        if seq < 0:
            return
        seq_len = tl.load(work + num_tiles + tile)
        begin, end = tl.load(work + 2 * num_tiles + tile), tl.load(work + 3 * num_tiles + tile)
        first_share, num_shares = tl.load(work + 4 * num_tiles + tile), tl.load(work + 5 * num_tiles + tile)
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
        begin, end = 0, seq_len - num_queries + tl.minimum(first_query + BLOCK_Q, num_queries)

    rows = tl.arange(0, BLOCK_M)
    queries = first_query + rows // GROUP
    heads = part * GROUP + rows % GROUP
    real_row = (rows < BLOCK_Q * GROUP) & (queries < num_queries) & (heads < NUM_HEADS)
    tokens = (start + queries).to(tl.int64)
    seen_before = seq_len - num_queries + queries + 1
    value_dims, rest_dims = tl.arange(0, VALUE_PADDED), tl.arange(0, REST_PADDED)
    q_row = query + tokens[:, None] * query_token_stride + heads[:, None] * query_head_stride
    q = tl.load(q_row + value_dims[None, :], mask=real_row[:, None] & (value_dims[None, :] < VALUE_DIM), other=0.0)
    q_rest = tl.load(
        q_row + VALUE_DIM + rest_dims[None, :],
        mask=real_row[:, None] & (rest_dims[None, :] < DIM - VALUE_DIM), other=0.0,
    )  # fmt: skip
    TOGETHER: tl.constexpr = 2 if LARGEST > 0 else 1  # numbers that are read as one
    if LARGEST > 0:  # `scale` includes 1 / LARGEST
        q, q_second = tl.split(tl.reshape(q.to(PRODUCT), [BLOCK_M, VALUE_PADDED // 2, 2]))
        q_rest, q_rest_second = tl.split(tl.reshape(q_rest.to(PRODUCT), [BLOCK_M, REST_PADDED // 2, 2]))
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    acc = tl.full([BLOCK_M, VALUE_PADDED // TOGETHER], 0.0, tl.float32)
    acc_second = acc
    columns, rest_columns = tl.arange(0, VALUE_PADDED // TOGETHER), tl.arange(0, REST_PADDED // TOGETHER)
    table = block_tables + seq.to(tl.int64) * table_stride
    next_keys = begin + tl.arange(0, BLOCK_N)
    block = tl.load(table + next_keys // BLOCK_SIZE, mask=next_keys < end, other=0)
    for first_key in range(begin, end, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        slots = block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE
        next_keys = keys + BLOCK_N
        block = tl.load(table + next_keys // BLOCK_SIZE, mask=next_keys < end, other=0)
        real_key = keys < end
        row = cache + slots[:, None] * (DIM // TOGETHER)
        latent = tl.load(
            row + columns[None, :], mask=real_key[:, None] & (columns[None, :] < VALUE_DIM // TOGETHER), other=0
        )
        rest = tl.load(
            row + VALUE_DIM // TOGETHER + rest_columns[None, :],
            mask=real_key[:, None] & (rest_columns[None, :] < (DIM - VALUE_DIM) // TOGETHER), other=0,
        )  # fmt: skip
        if LARGEST > 0:
            key_scales = tl.load(scales + slots, mask=real_key, other=0.0)
            latent, latent_second = convert_pairs(latent, LARGEST == 127, q.dtype)
            rest, rest_second = convert_pairs(rest, LARGEST == 127, q.dtype)
            scores = tl.dot(q_second, tl.trans(latent_second), input_precision="ieee")
            scores = tl.dot(q_rest_second, tl.trans(rest_second), scores, input_precision="ieee")
            scores = tl.dot(q, tl.trans(latent), scores, input_precision="ieee")
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee") * key_scales[None, :]
        else:
            scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
            scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision="ieee")
        scores *= scale * _LOG2_E
        visible = (keys[None, :] < seen_before[:, None]) & real_key[None, :]
        scores = tl.where(visible, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, axis=1))
        safe = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        p = tl.exp2(scores - safe[:, None])
        factor = tl.exp2(highest - safe)
        total = total * factor + tl.sum(p, axis=1)
        acc *= factor[:, None]
        if LARGEST > 0:
            p = (p * (key_scales * _LIFT)[None, :]).to(q.dtype)
            acc_second = tl.dot(p, latent_second, acc_second * factor[:, None], input_precision="ieee")
            acc = tl.dot(p, latent, acc, input_precision="ieee")
        else:
            acc = tl.dot(p.to(q.dtype), latent, acc, input_precision="ieee")
        highest = new_highest

    if LARGEST > 0:
        acc = tl.reshape(tl.join(acc, acc_second), [BLOCK_M, VALUE_PADDED]) * (1.0 / (LARGEST * _LIFT))
    real_out = real_row[:, None] & (value_dims[None, :] < VALUE_DIM)
    if DECODE:
        if num_shares > 1:
            part_row = tile * NUM_HEADS + heads
            tl.store(partial_out + part_row[:, None] * VALUE_DIM + value_dims[None, :], acc, mask=real_out)
            tl.store(partial_highest + part_row, highest, mask=real_row)
            tl.store(partial_sum + part_row, total, mask=real_row)
            tl.debug_barrier()  # all stores of this program's threads must precede its arrival
            counter = arrived + seq * NUM_PARTS + part
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


@dataclass(frozen=True, slots=True)
class _Tile:
    """The rows and keys that a program computes at once, and its launch options."""

    rows: int
    keys: int
    num_warps: int


_DECODE, _PROMPT = _Tile(16, 32, 4), _Tile(32, 16, 8)
_NUM_STAGES, _NUM_STAGES_FLOAT32 = 3, 2  # so that all tiles fit into 99 KiB of shared memory, as some GPUs have


def count_parts(num_heads: int) -> int:
    """Return among how many programs the heads of a token are divided."""
    return -(-num_heads // _MOST_HEADS)


def latent_attention(
    query: torch.Tensor,
    keys: SlotCache,
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    out: torch.Tensor,
    *,
    block_size: int,
    num_queries: int,
    plan: DecodePlan | None,
    scaling: float,
) -> None:
    """Do the same as `paged_attention.paged_attention` for query (T, H, D), keys (slots, 1, D) and out (T, H, Dv).

    The plan's KV heads are the parts of `count_parts`.
    """
    numbers, largest = keys.numbers, keys.largest
    num_heads, dim = query.shape[1:]
    value_dim, num_parts = out.shape[2], count_parts(num_heads)
    group = triton.cdiv(num_heads, num_parts)
    tile = _PROMPT if plan is None else _DECODE
    tokens_per_tile, num_seqs = tile.rows // group, seq_lens.shape[0]
    num_tiles = num_queries // tokens_per_tile + num_seqs if plan is None else plan.work.shape[1]
    least = 32 if largest else 16
    _attend_latents[(num_parts * num_tiles,)](
        out, plan and plan.work, plan and plan.arrived,
        plan and plan.partial_out, plan and plan.partial_highest, plan and plan.partial_sum,
        query, numbers.view(torch.int16) if largest else numbers, keys.scales, query_start, seq_lens, block_tables,
        scaling / (largest or 1.0), query.stride(0), query.stride(1), block_tables.stride(0), num_seqs,
        GROUP=group, NUM_HEADS=num_heads, NUM_PARTS=num_parts, DIM=dim, VALUE_DIM=value_dim,
        VALUE_PADDED=max(least, triton.next_power_of_2(value_dim)),
        REST_PADDED=max(least, triton.next_power_of_2(dim - value_dim)),
        LARGEST=largest, PRODUCT=tl.float32 if query.dtype == torch.float32 else tl.float16, BLOCK_SIZE=block_size,
        BLOCK_M=tile.rows, BLOCK_Q=tokens_per_tile, BLOCK_N=tile.keys if query.itemsize < 4 else tile.keys // 2,
        DECODE=plan is not None, **early_launch(), num_warps=tile.num_warps,
        num_stages=_NUM_STAGES if query.itemsize < 4 else _NUM_STAGES_FLOAT32,
    )  # fmt: skip
