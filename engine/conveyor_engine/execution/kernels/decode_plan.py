"""Divides the keys of the decodes among the programs of attention, so that the GPU is full and all have similar work.

The plan is computed on the device from the lengths of the rows, once per step for all layers of one shape. So the host
launches the same grid for each batch of one size, whatever its lengths are. A CUDA graph needs this. A row that is much
longer than the others is divided among many programs. FlashInfer (Ye et al., MLSys'25) computes such a plan on the
host.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

KEYS_PER_PROGRAM = 128  # minimum for rows that are at least this long; joining smaller shares costs more than it gains
_MOST_SHARES = 32  # maximum for one row, because the row's last program joins its shares one after another
_ALIGNED_TO = 64  # keys; a multiple of the keys of a tile, except for tiles over 8 bits, which have up to 128
_PROGRAMS_PER_PROCESSOR = 8  # more than run at once, so that shares of rows with different lengths end together
_ROWS_AT_ONCE = 256
_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The shares of the keys for G programs, and the memory in which the programs of one row join their results.

    G is an upper bound: the lower of rows + `spread` and `_MOST_SHARES` x rows. Each row has at least one program (none
    if its length is 0) and at most `_MOST_SHARES`. The shares are so large that all further programs number at most
    `spread`.
    """

    work: torch.Tensor  # int32 (6, G): row or -1, its length, first key, end of keys, its first program, their count
    arrived: torch.Tensor  # int32 (rows, Hkv): number of the row's programs that are done; 0 between layers
    partial_out: torch.Tensor  # float32 (G, H, Dv), not normalised
    partial_highest: torch.Tensor  # float32 (G, H)
    partial_sum: torch.Tensor  # float32 (G, H)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["seq_lens"])
def _plan_decodes(
    work, arrived, seq_lens, num_rows,
    SPREAD: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr, MOST_SHARES: tl.constexpr,
    ALIGNED_TO: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, KV_HEADS_PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute the work of one program of attention: one column of `work`."""
    program = tl.program_id(0)
    lanes = tl.arange(0, ROWS)
    total = tl.zeros([], tl.int64)
    for begin in range(0, num_rows, ROWS):
        total += tl.sum(_visible(seq_lens, begin + lanes, num_rows, WINDOW).to(tl.int64), axis=0)
    most = tl.maximum(LEAST, tl.cdiv(total, SPREAD)).to(tl.int32)
    most = tl.cdiv(most, ALIGNED_TO) * ALIGNED_TO

    row, first, planned = 0, 0, 0  # this program's row; the row's first program; all programs so far
    for begin in range(0, num_rows, ROWS):
        rows = begin + lanes
        shares = tl.where(rows < num_rows, _shares(_visible(seq_lens, rows, num_rows, WINDOW), most, MOST_SHARES), 0)
        ends = planned + tl.cumsum(shares, axis=0)
        before = (rows < num_rows) & (ends <= program)
        row += tl.sum(before.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(before, ends, 0), axis=0))
        planned += tl.sum(shares, axis=0)

    seq_len = tl.load(seq_lens + tl.minimum(row, num_rows - 1))
    visible = _cut(seq_len, WINDOW)
    shares = _shares(visible, most, MOST_SHARES)
    share = tl.cdiv(tl.cdiv(visible, tl.maximum(shares, 1)), ALIGNED_TO) * ALIGNED_TO
    first_key = seq_len - visible + (program - first) * share
    column = work + program
    count = tl.num_programs(0)
    tl.store(column, tl.where(row < num_rows, row, -1))
    tl.store(column + count, seq_len)
    tl.store(column + 2 * count, first_key)
    tl.store(column + 3 * count, tl.minimum(first_key + share, seq_len))
    tl.store(column + 4 * count, first)
    tl.store(column + 5 * count, shares)
    if program < num_rows:
        heads = tl.arange(0, KV_HEADS_PADDED)
        tl.store(arrived + program * NUM_KV_HEADS + heads, 0, mask=heads < NUM_KV_HEADS)


@triton.jit
def _visible(seq_lens, rows, num_rows, WINDOW: tl.constexpr):
    return _cut(tl.load(seq_lens + rows, mask=rows < num_rows, other=0), WINDOW)


@triton.jit
def _cut(lengths, WINDOW: tl.constexpr):
    if WINDOW > 0:
        lengths = tl.minimum(lengths, WINDOW)
    return lengths


@triton.jit
def _shares(visible, most, MOST_SHARES: tl.constexpr):
    return tl.minimum(tl.cdiv(visible, most), MOST_SHARES)


def plan_decodes(
    seq_lens: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    value_dim: int,
    sliding_window: int | None,
    num_processors: int,
) -> DecodePlan:
    """Compute the plan for rows of lengths seq_lens (rows,), int32 on the device, and for layers of this shape.

    num_processors: multiprocessors of the GPU to keep busy.
    """
    num_rows, device = seq_lens.shape[0], seq_lens.device
    spread = max(1, _PROGRAMS_PER_PROCESSOR * num_processors // num_kv_heads)
    num_programs = min(num_rows + spread, _MOST_SHARES * num_rows)
    work = torch.empty((_COLUMNS, num_programs), dtype=torch.int32, device=device)
    arrived = torch.empty((num_rows, num_kv_heads), dtype=torch.int32, device=device)
    _plan_decodes[(num_programs,)](
        work, arrived, seq_lens, num_rows,
        SPREAD=spread, WINDOW=sliding_window or 0, LEAST=KEYS_PER_PROGRAM, MOST_SHARES=_MOST_SHARES,
        ALIGNED_TO=_ALIGNED_TO,
        NUM_KV_HEADS=num_kv_heads, KV_HEADS_PADDED=triton.next_power_of_2(num_kv_heads), ROWS=_ROWS_AT_ONCE,
        num_warps=1,
    )  # fmt: skip
    partial_out = torch.empty((num_programs, num_heads, value_dim), dtype=torch.float32, device=device)
    highest, total = partial_out.new_empty((2, num_programs, num_heads)).unbind()
    return DecodePlan(work, arrived, partial_out, highest, total)
