"""Prepares merged queries, keys and values for attention: norms and rotates the heads, and writes keys and values to
the cache.

One kernel replaces two norms, two rotations and two copies. Each program computes a few heads of one token.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.kernels.quantise import quantise
from conveyor_engine.execution.kernels.slot_cache import SlotCache

_HEADS_PER_PROGRAM = 4


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The RMSNorm of each query head and each key head. The weights are (D,)."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    offset: float


@triton.jit
def _prepare_heads(
    qkv, query, exact_keys, keys, values, key_scales, value_scales, slots, cos, sin, query_weight, key_weight,
    eps, offset, scales_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PADDED: tl.constexpr,
    ROTARY: tl.constexpr, HAS_NORMS: tl.constexpr, HAS_EXACT: tl.constexpr, LARGEST: tl.constexpr,
    BLOCK: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    heads = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dims = tl.arange(0, DIM_PADDED)
    is_query = (heads < NUM_HEADS)[:, None]
    is_key = ((heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS))[:, None]
    is_value = (heads >= NUM_HEADS + NUM_KV_HEADS)[:, None]
    real = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & (dims < DIM)[None, :]
    turned = dims < ROTARY
    partners = tl.where(dims < ROTARY // 2, dims + ROTARY // 2, dims - ROTARY // 2)  # the other half of each pair

    rows = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * DIM) + heads[:, None] * DIM
    plain = tl.load(rows + dims[None, :], mask=real, other=0.0).to(tl.float32)
    x = plain
    y = tl.load(rows + partners[None, :], mask=real & turned[None, :], other=0.0).to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x *= scale * _weights(query_weight, key_weight, dims, dims < DIM, is_query, offset)
        y *= scale * _weights(query_weight, key_weight, partners, turned, is_query, offset)
    c = tl.load(cos + token * ROTARY + dims, mask=turned, other=1.0).to(tl.float32)
    s = tl.load(sin + token * ROTARY + dims, mask=turned, other=0.0).to(tl.float32)
    s = tl.where(dims < ROTARY // 2, -s, s)
    exact = tl.where(is_value, plain, x * c[None, :] + y * s[None, :])
    x = exact.to(query.dtype.element_ty)

    tl.store(query + token * (NUM_HEADS * DIM) + heads[:, None] * DIM + dims[None, :], x, mask=real & is_query)
    if HAS_EXACT:
        places = exact_keys + token * (NUM_KV_HEADS * DIM) + (heads - NUM_HEADS)[:, None] * DIM + dims[None, :]
        tl.store(places, x, mask=real & is_key)
    numbers = x
    if LARGEST > 0:  # the cache has 8 bits
        numbers, scales = quantise(exact, keys.dtype.element_ty, LARGEST)
    if slot >= 0:  # negative slots are padding
        cached = slot * (NUM_KV_HEADS * DIM) + dims[None, :]
        key_heads, value_heads = heads - NUM_HEADS, heads - NUM_HEADS - NUM_KV_HEADS
        if LARGEST > 0:
            of_key, of_value = key_scales + slot, value_scales + slot
            is_its_key = (key_heads >= 0) & (key_heads < NUM_KV_HEADS)
            is_its_value = (value_heads >= 0) & (value_heads < NUM_KV_HEADS)
            tl.store(of_key + key_heads.to(tl.int64) * scales_stride, scales, mask=is_its_key)
            tl.store(of_value + value_heads.to(tl.int64) * scales_stride, scales, mask=is_its_value)
        tl.store(keys + cached + key_heads[:, None] * DIM, numbers, mask=real & is_key)
        tl.store(values + cached + value_heads[:, None] * DIM, numbers, mask=real & is_value)


@triton.jit
def _weights(query_weight, key_weight, dims, real, is_query, offset):
    """Return the norm's weights (heads, D), including the offset: those of the query or of the key for each head."""
    of_query = tl.load(query_weight + dims, mask=real, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dims, mask=real, other=0.0).to(tl.float32)
    return offset + tl.where(is_query, of_query[None, :], of_key[None, :])


def prepare_heads(
    qkv: torch.Tensor,
    rotation: tuple[torch.Tensor, torch.Tensor],
    norms: HeadNorms | None,
    caches: tuple[SlotCache, SlotCache],
    slots: torch.Tensor,
    exact_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the queries (T, H, D) of qkv (T, H + 2 Hkv, D), and write keys and values to `slots` (T,) of the caches.

    Heads are normed (if `norms` is given) and rotated by cos, sin (1, T, R), R <= D. The rotation pairs the halves of
    R, as transformers' apply_rotary_pos_emb does. Results are rounded once, also to the type of the cache. Tokens with
    a negative slot are not written. exact_keys (T, Hkv, D), contiguous, also gets the keys of all tokens, in its type.
    """
    tokens, heads, dim = qkv.shape
    keys, values = (cache.numbers for cache in caches)
    cos, sin = rotation
    num_kv_heads = keys.shape[1]
    num_heads = heads - 2 * num_kv_heads
    assert keys.shape[2] == values.shape[2] == dim
    assert cos.shape == sin.shape == (1, tokens, cos.shape[2])
    assert slots.shape == (tokens,)
    assert all(x.is_contiguous() for x in (qkv, keys, values, cos, sin))
    query = qkv.new_empty((tokens, num_heads, dim))
    _prepare_heads[(tokens, triton.cdiv(heads, _HEADS_PER_PROGRAM))](
        qkv, query, exact_keys, keys, values, *(cache.scales for cache in caches), slots, cos, sin,
        norms and norms.query, norms and norms.key, norms.eps if norms else 0.0, norms.offset if norms else 0.0,
        caches[0].scales_stride,
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, DIM=dim, DIM_PADDED=triton.next_power_of_2(dim),
        ROTARY=cos.shape[2], HAS_NORMS=norms is not None, HAS_EXACT=exact_keys is not None,
        LARGEST=caches[0].largest, BLOCK=_HEADS_PER_PROGRAM, **early_launch(),
    )  # fmt: skip
    return query
