"""Computes Mamba-2 over the sequences of a step, in the states of their rows.

The recurrence (arXiv 2405.21060) for the state S (D, N) of a head, and a token's x (D), b (N), c (N) and time step dt:

    S = exp(dt * decay) * S + dt * x b^T;  out = S c + direct * x

Decodes compute it so, in one launch. Prompts are one launch too, which goes through the chunks of each sequence: the
results of a chunk are those of the state before it, and those of its own tokens by products of c and b (SSD, section 6
there).
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.softplus import softplus
from conveyor_engine.execution.state_rows import StateRows

_NUMBERS = 4096  # of a head's state in a program, so that the heads of one sequence fill a GPU
_CHUNKS = ((128, 32), (256, 16))  # tokens, by the size that b and c have at most
_NOT_ALIGNED = ["query_start", "rows", "is_new"]


@triton.jit
def _bound(steps, step_min, step_max, is_bounded):
    """Return the time steps, which transformers bounds only for several tokens, and for the first token of a row."""
    return tl.where(is_bounded, tl.minimum(tl.maximum(steps, step_min), step_max), steps)


@triton.jit(do_not_specialize_on_alignment=_NOT_ALIGNED)
def _mamba2_decodes(
    out, state, xbc, dt, decay, direct, dt_bias, query_start, rows, is_new, xbc_stride, dt_stride, step_min, step_max,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    dims, numbers = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, SIZE_PADDED)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.program_id(0)
    token = tl.load(query_start + seq).to(tl.int64)
    if tl.load(query_start + seq + 1) == token:
        return
    of_dim, of_number = dims < DIM, numbers < SIZE
    of_token = xbc + token * xbc_stride
    x = tl.load(of_token + head * DIM + dims, mask=of_dim, other=0.0).to(tl.float32)
    of_group = of_token + HEADS * DIM + (head // (HEADS // GROUPS)) * SIZE + numbers
    b = tl.load(of_group, mask=of_number, other=0.0).to(tl.float32)
    c = tl.load(of_group + GROUPS * SIZE, mask=of_number, other=0.0).to(tl.float32)
    fresh = tl.load(is_new + seq).to(tl.int32)
    step = softplus(tl.load(dt + token * dt_stride + head).to(tl.float32) + tl.load(dt_bias + head))
    step = _bound(step, step_min, step_max, fresh > 0)

    row = tl.load(rows + seq)
    held = state + ((row * HEADS + head) * DIM + dims[:, None]) * SIZE + numbers[None, :]
    real = of_dim[:, None] & of_number[None, :]
    is_old = dims < DIM * (1 - fresh)
    s = tl.load(held, mask=real & is_old[:, None], other=0.0) * tl.exp(step * tl.load(decay + head))
    s += (x * step)[:, None] * b[None, :]
    tl.store(held, s, mask=real)
    y = tl.sum(s * c[None, :], axis=1) + tl.load(direct + head) * x
    tl.store(out + (token * HEADS + head) * DIM + dims, y.to(out.dtype.element_ty), mask=of_dim)


@triton.jit(do_not_specialize_on_alignment=_NOT_ALIGNED)
def _mamba2_chunks(
    out, state, xbc, dt, decay, direct, dt_bias, query_start, rows, is_new, xbc_stride, dt_stride, step_min, step_max,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr, CHUNK: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a sequence, with some rows of a head's state."""
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - start
    if length == 0:
        return
    dims, numbers = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, SIZE_PADDED)
    i, j = tl.arange(0, CHUNK)[None, :], tl.arange(0, CHUNK)[:, None]
    tokens = tl.arange(0, CHUNK)
    of_dim, of_number = dims < DIM, numbers < SIZE
    row = tl.load(rows + seq)
    held = state + (row * HEADS + head) * (DIM * SIZE) + (dims[:, None] * SIZE + numbers[None, :])
    real_state = of_dim[:, None] & of_number[None, :]
    fresh = tl.load(is_new + seq).to(tl.int32)
    is_old = dims < DIM * (1 - fresh)
    s = tl.load(held, mask=real_state & is_old[:, None], other=0.0)
    is_bounded = (length > 1) | (fresh > 0)
    of_decay, of_direct, bias = tl.load(decay + head), tl.load(direct + head), tl.load(dt_bias + head)
    number = xbc.dtype.element_ty
    of_heads = xbc + head * DIM
    of_groups = xbc + HEADS * DIM + (head // (HEADS // GROUPS)) * SIZE
    x_places = tokens[None, :] * xbc_stride + dims[:, None]  # within a chunk
    b_places = tokens[:, None] * xbc_stride + numbers[None, :]
    of_dt = dt + start.to(tl.int64) * dt_stride + head
    raw_steps = tl.load(of_dt + tokens * dt_stride, mask=tokens < length, other=0.0)
    for first in range(0, length, CHUNK):
        place = (start + first).to(tl.int64)
        real = first + tokens < length
        real_x, real_b = of_dim[:, None] & real[None, :], real[:, None] & of_number[None, :]
        x = tl.load(of_heads + place * xbc_stride + x_places, mask=real_x, other=0.0)
        b = tl.load(of_groups + place * xbc_stride + b_places, mask=real_b, other=0.0)
        c = tl.load(of_groups + GROUPS * SIZE + place * xbc_stride + b_places, mask=real_b, other=0.0)
        steps = _bound(softplus(raw_steps.to(tl.float32) + bias), step_min, step_max, is_bounded)
        steps = tl.where(real, steps, 0.0)
        following = first + CHUNK + tokens  # Triton loads only factors of products ahead of time
        raw_steps = tl.load(of_dt + following.to(tl.int64) * dt_stride, mask=following < length, other=0.0)
        total = tl.cumsum(steps * of_decay, axis=0)
        whole = tl.sum(steps * of_decay, axis=0)

        between = tl.exp(tl.where(i >= j, total[None, :] - total[:, None], 0.0)) * steps[:, None]
        scores = tl.dot(b, tl.trans(c), input_precision="ieee") * tl.where(i >= j, between, 0.0)  # of token j for i
        y = tl.dot(s.to(number), tl.trans(c), input_precision="ieee") * tl.exp(total)[None, :]
        y = tl.dot(x, scores.to(number), y, input_precision="ieee") + x.to(tl.float32) * of_direct
        added = (x.to(tl.float32) * (tl.exp(whole - total) * steps)[None, :]).to(number)
        s = tl.dot(added, b, s * tl.exp(whole), input_precision="ieee")
        out_places = tokens[None, :] * (HEADS * DIM) + dims[:, None]
        of_out = out + place * (HEADS * DIM) + head * DIM
        tl.store(of_out + out_places, y.to(out.dtype.element_ty), mask=real_x)
    tl.store(held, s, mask=real_state)


def mamba2(
    rows: StateRows,
    xbc: torch.Tensor,
    dt: torch.Tensor,
    state: torch.Tensor,
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    num_groups: int,
    limits: tuple[float, float],
) -> torch.Tensor:
    """Do the same as `native.states.mamba2`."""
    _, num_heads, head_dim, size = state.shape
    assert xbc.shape[1] == num_heads * head_dim + 2 * num_groups * size
    assert state.is_contiguous()
    assert xbc.stride(1) == dt.stride(1) == 1
    out = rows.make_results(xbc, num_heads, head_dim)
    padded = triton.next_power_of_2(size)
    block_d = min(max(16, _NUMBERS // padded), triton.next_power_of_2(head_dim))
    parts = triton.cdiv(head_dim, block_d)
    before = out, state, xbc, dt, *heads
    after = (xbc.stride(0), dt.stride(0), *limits)
    sizes = {"HEADS": num_heads, "GROUPS": num_groups, "DIM": head_dim, "SIZE": size, "SIZE_PADDED": padded}
    if rows.num_decodes:
        _mamba2_decodes[(rows.num_decodes, num_heads, parts)](
            *before, rows.query_start, rows.rows, rows.is_new, *after,
            **sizes, BLOCK_D=block_d, num_warps=4, **early_launch(),
        )  # fmt: skip
    if rows.num_prompts:
        first = rows.num_decodes
        _mamba2_chunks[(parts, num_heads, rows.num_prompts)](
            *before, rows.query_start[first:], rows.rows[first:], rows.is_new[first:], *after,
            **sizes, BLOCK_D=block_d, CHUNK=next(chunk for most, chunk in _CHUNKS if size <= most),
            num_warps=4 if xbc.itemsize < 4 else 8, num_stages=3 if xbc.itemsize < 4 else 2, **early_launch(),
        )  # fmt: skip
    return out
