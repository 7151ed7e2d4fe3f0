"""Computes the gated delta rule over the sequences of a step, in the states of their rows.

The rule (Gated DeltaNet, arXiv 2412.06464) for the state S (Dk, Dv) of a head and a token's unit vectors q and k:

    S = decay * S;  change = beta * (v - k S);  S = S + k^T change;  out = q S

Decodes compute it so, in one launch. Prompts are computed in chunks (section 3.3 there). The changes of a chunk's
tokens follow from S before the chunk by a triangular matrix, which does not depend on S. So one launch finds these
matrices for all chunks at once, and a second one goes through the chunks of each sequence.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.paged_attention import _find_sequence
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.softplus import softplus
from conveyor_engine.execution.state_rows import StateRows

_EPS = tl.constexpr(1e-6)  # transformers' for unit vectors
_CHUNK = 32  # tokens
_COLUMNS = 32  # of a head's state in a program, so that the heads of one sequence fill a GPU
_NOT_SPECIAL = ["num_prompts", "num_tokens"]
_NOT_ALIGNED = ["query_start", "rows", "is_new"]


@triton.jit
def _gates(a, b, decay, dt_bias, places, real, head, a_stride, b_stride, beta_scale):
    """Return the logarithms of decays, and betas, of these tokens; both do nothing where there is no token."""
    step = tl.load(a + places * a_stride + head, mask=real, other=0.0).to(tl.float32) + tl.load(dt_bias + head)
    beta = tl.load(b + places * b_stride + head, mask=real, other=0.0).to(tl.float32)
    beta = beta_scale * tl.sigmoid(beta)
    return tl.where(real, tl.load(decay + head) * softplus(step), 0.0), tl.where(real, beta, 0.0)


@triton.jit(do_not_specialize=_NOT_SPECIAL, do_not_specialize_on_alignment=_NOT_ALIGNED)
def _delta_decodes(
    out, state, qkv, a, b, decay, dt_bias, query_start, rows, is_new,
    qkv_stride, a_stride, b_stride, scale, beta_scale,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    keys = tl.arange(0, KEY_PADDED)
    values = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq = tl.program_id(0)
    token = tl.load(query_start + seq).to(tl.int64)
    if tl.load(query_start + seq + 1) == token:
        return
    key_head = head // (HEADS // KEY_HEADS)
    of_key, of_value = keys < KEY_DIM, values < VALUE_DIM
    places = qkv + token * qkv_stride + key_head * KEY_DIM + keys
    q = tl.load(places, mask=of_key, other=0.0).to(tl.float32)
    k = tl.load(places + KEY_HEADS * KEY_DIM, mask=of_key, other=0.0).to(tl.float32)
    of_values = qkv + token * qkv_stride + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + values
    v = tl.load(of_values, mask=of_value, other=0.0).to(tl.float32)
    log_decay, beta = _gates(a, b, decay, dt_bias, token, token >= 0, head, a_stride, b_stride, beta_scale)
    q *= tl.rsqrt(tl.sum(q * q, axis=0) + _EPS) * scale
    k *= tl.rsqrt(tl.sum(k * k, axis=0) + _EPS)

    row = tl.load(rows + seq)
    held = state + ((row * HEADS + head) * KEY_DIM + keys[:, None]) * VALUE_DIM + values[None, :]
    real = of_key[:, None] & of_value[None, :]
    is_old = keys < KEY_DIM * (1 - tl.load(is_new + seq).to(tl.int32))
    s = tl.load(held, mask=real & is_old[:, None], other=0.0) * tl.exp(log_decay)
    change = (v - tl.sum(s * k[:, None], axis=0)) * beta
    s += k[:, None] * change[None, :]
    tl.store(held, s, mask=real)
    y = tl.sum(s * q[:, None], axis=0)
    tl.store(out + (token * HEADS + head) * VALUE_DIM + values, y.to(out.dtype.element_ty), mask=of_value)


@triton.jit(do_not_specialize=_NOT_SPECIAL, do_not_specialize_on_alignment=_NOT_ALIGNED)
def _delta_matrices(
    changes, scores, factors, qkv, a, b, decay, dt_bias, query_start,
    qkv_stride, a_stride, b_stride, scale, beta_scale, num_tokens, num_prompts,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    CHUNK: tl.constexpr, LEVELS: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    """Compute for a chunk what does not depend on the state before it.

    changes: (heads, T, CHUNK), the matrix from v - k S to the changes of the chunk's tokens. scores: (heads, T, CHUNK),
    from the changes to the results. factors: (4, heads, T): of k S, of q S, of k in the next state, and of the state.
    """
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile, head = tl.program_id(0), tl.program_id(1)
    first_of_all = tl.load(query_start)
    seq = _find_sequence(query_start, tile, num_prompts, first_of_all, CHUNK)
    start = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - start
    first = (tile - ((start - first_of_all) // CHUNK + seq)) * CHUNK
    if first >= length:
        return
    places = (start + first + tl.arange(0, CHUNK)).to(tl.int64)
    real = first + tl.arange(0, CHUNK) < length
    keys = tl.arange(0, KEY_PADDED)
    mask = real[:, None] & (keys < KEY_DIM)[None, :]
    of_head = qkv + places[:, None] * qkv_stride + (head // (HEADS // KEY_HEADS)) * KEY_DIM + keys[None, :]
    q = tl.load(of_head, mask=mask, other=0.0)
    k = tl.load(of_head + KEY_HEADS * KEY_DIM, mask=mask, other=0.0)
    q_unit = scale * tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + _EPS)
    k_unit = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + _EPS)
    log_decay, beta = _gates(a, b, decay, dt_bias, places, real, head, a_stride, b_stride, beta_scale)
    total = tl.cumsum(log_decay, axis=0)

    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    between = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))  # the decay from token j to token i
    of_keys = tl.dot(k, tl.trans(k), input_precision="ieee") * between * k_unit[:, None] * k_unit[None, :]
    of_queries = tl.dot(q, tl.trans(k), input_precision="ieee") * between * q_unit[:, None] * k_unit[None, :]
    # The changes are the solution of (1 + lower) changes = beta * (v - k S). The inverse is found for blocks on the
    # diagonal, of one token and then of twice as many: that of ((A, 0), (B, C)) has -C^-1 B A^-1 below its diagonal.
    lower = beta[:, None] * of_keys
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where((i // 2 == j // 2) & (i > j), lower, 0.0)
    for level in tl.static_range(1, LEVELS):
        below = tl.where((i >> level > j >> level) & (i >> (level + 1) == j >> (level + 1)), lower, 0.0)
        product = tl.dot(below, inverse, input_precision="ieee")
        inverse -= tl.dot(inverse, product, input_precision="ieee")

    chunk = (places[:, None] + head * num_tokens) * CHUNK + j
    number = changes.dtype.element_ty
    tl.store(changes + chunk, (inverse * beta[None, :]).to(number), mask=real[:, None])
    tl.store(scores + chunk, tl.where(i >= j, of_queries, 0.0).to(number), mask=real[:, None])
    of_factors, stride = factors + head * num_tokens + places, HEADS * num_tokens
    since = tl.exp(total)
    tl.store(of_factors, since * k_unit, mask=real)
    tl.store(of_factors + stride, since * q_unit, mask=real)
    tl.store(of_factors + 2 * stride, tl.exp(tl.sum(log_decay, axis=0) - total) * k_unit, mask=real)
    tl.store(of_factors + 3 * stride, since, mask=real)


@triton.jit(do_not_specialize=_NOT_SPECIAL, do_not_specialize_on_alignment=_NOT_ALIGNED)
def _delta_chunks(
    out, state, qkv, changes, scores, factors, query_start, rows, is_new, qkv_stride, num_tokens,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_PADDED: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    """Go through the chunks of a sequence, with some columns of a head's state.

    All is transposed: results of a product are then the first factor of the next one, and stay in a warp's registers.
    """
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    seq, head = tl.program_id(2), tl.program_id(1)
    start = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - start
    if length == 0:
        return
    keys, j = tl.arange(0, KEY_PADDED), tl.arange(0, CHUNK)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    of_key, of_value = keys < KEY_DIM, values < VALUE_DIM
    row = tl.load(rows + seq)
    held = state + (row * HEADS + head) * (KEY_DIM * VALUE_DIM) + (keys[None, :] * VALUE_DIM + values[:, None])
    real_state = of_key[None, :] & of_value[:, None]
    is_old = keys < KEY_DIM * (1 - tl.load(is_new + seq).to(tl.int32))
    s = tl.load(held, mask=real_state & is_old[None, :], other=0.0)
    number = qkv.dtype.element_ty
    of_keys = qkv + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * KEY_DIM
    of_values = qkv + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM
    key_places = j[:, None] * qkv_stride + keys[None, :]  # within a chunk
    value_places = j[None, :] * qkv_stride + values[:, None]
    matrix_places = j[:, None] * CHUNK + j[None, :]
    for first in range(0, length, CHUNK):
        place = (start + first).to(tl.int64)
        real = first + j < length
        real_key, real_value = real[:, None] & of_key[None, :], real[None, :] & of_value[:, None]
        k = tl.load(of_keys + place * qkv_stride + key_places, mask=real_key, other=0.0)
        q = tl.load(of_keys - KEY_HEADS * KEY_DIM + place * qkv_stride + key_places, mask=real_key, other=0.0)
        v = tl.load(of_values + place * qkv_stride + value_places, mask=real_value, other=0.0)
        of_head = place + head * num_tokens
        to_changes = tl.load(changes + of_head * CHUNK + matrix_places, mask=real[:, None], other=0.0)
        to_results = tl.load(scores + of_head * CHUNK + matrix_places, mask=real[:, None], other=0.0)
        of_k = tl.load(factors + of_head + j, mask=real, other=0.0)
        of_q = tl.load(factors + HEADS * num_tokens + of_head + j, mask=real, other=0.0)
        of_next = tl.load(factors + 2 * HEADS * num_tokens + of_head + j, mask=real, other=0.0)
        of_state = tl.load(factors + 3 * HEADS * num_tokens + of_head + tl.minimum(CHUNK, length - first) - 1)

        before = s.to(number)
        missing = v.to(tl.float32) - tl.dot(before, tl.trans(k), input_precision="ieee") * of_k[None, :]
        change = tl.dot(missing.to(number), tl.trans(to_changes), input_precision="ieee")
        y = tl.dot(before, tl.trans(q), input_precision="ieee") * of_q[None, :]
        y = tl.dot(change.to(number), tl.trans(to_results), y, input_precision="ieee")
        s = tl.dot((change * of_next[None, :]).to(number), k, s * of_state, input_precision="ieee")
        of_out = out + place * (HEADS * VALUE_DIM) + head * VALUE_DIM
        out_places = j[None, :] * (HEADS * VALUE_DIM) + values[:, None]
        tl.store(of_out + out_places, y.to(out.dtype.element_ty), mask=real_value)
    tl.store(held, s, mask=real_state)


def delta_rule(
    rows: StateRows,
    qkv: torch.Tensor,
    gates: tuple[torch.Tensor, torch.Tensor],
    state: torch.Tensor,
    decay: torch.Tensor,
    dt_bias: torch.Tensor,
    num_key_heads: int,
    beta_scale: float,
) -> torch.Tensor:
    """Do the same as `native.states.delta_rule`."""
    _, heads, key_dim, value_dim = state.shape
    assert qkv.shape[1] == 2 * num_key_heads * key_dim + heads * value_dim
    assert state.is_contiguous()
    a, b = gates
    assert qkv.stride(1) == a.stride(1) == b.stride(1) == 1
    out = rows.make_results(qkv, heads, value_dim)
    dims = {
        "KEY_HEADS": num_key_heads, "HEADS": heads, "KEY_DIM": key_dim, "KEY_PADDED": triton.next_power_of_2(key_dim)
    }  # fmt: skip
    block_v = min(_COLUMNS, triton.next_power_of_2(value_dim))
    parts = triton.cdiv(value_dim, block_v)
    of_gates = (a, b, decay, dt_bias)
    strides, scales = (qkv.stride(0), a.stride(0), b.stride(0)), (key_dim**-0.5, beta_scale)
    if rows.num_decodes:
        _delta_decodes[(rows.num_decodes, heads, parts)](
            out, state, qkv, *of_gates, rows.query_start, rows.rows, rows.is_new, *strides, *scales,
            **dims, VALUE_DIM=value_dim, BLOCK_V=block_v, num_warps=4, **early_launch(),
        )  # fmt: skip
    if not rows.num_prompts:
        return out
    prompts = rows.query_start[rows.num_decodes :]
    changes, scores = qkv.new_empty((2, heads, len(qkv), _CHUNK)).unbind()
    factors = torch.empty((4, heads, len(qkv)), dtype=torch.float32, device=qkv.device)
    _delta_matrices[(rows.most_prompt_tokens // _CHUNK + rows.num_prompts, heads)](
        changes, scores, factors, qkv, *of_gates, prompts, *strides, *scales, len(qkv), rows.num_prompts,
        **dims, CHUNK=_CHUNK, LEVELS=_CHUNK.bit_length() - 1, num_warps=8, **early_launch(),
    )  # fmt: skip
    _delta_chunks[(parts, heads, rows.num_prompts)](
        out, state, qkv, changes, scores, factors, prompts, rows.rows[rows.num_decodes :],
        rows.is_new[rows.num_decodes :], qkv.stride(0), len(qkv),
        **dims, VALUE_DIM=value_dim, BLOCK_V=block_v, CHUNK=_CHUNK,
        num_warps=4 if qkv.itemsize < 4 else 8, num_stages=3 if qkv.itemsize < 4 else 2, **early_launch(),
    )  # fmt: skip
    return out
