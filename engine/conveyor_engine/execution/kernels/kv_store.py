"""Writes a step's keys and values to their slots in the paged caches."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.quantise import quantise
from conveyor_engine.execution.kernels.slot_cache import SlotCache


@triton.jit
def _store(
    source, cache, cache_scales, slots,
    token_stride, head_stride, scales_stride,
    LARGEST: tl.constexpr,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS_PADDED: tl.constexpr, DIM_PADDED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:  # padding
        return
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    dims = tl.arange(0, DIM_PADDED)[None, :]
    real = (heads < NUM_HEADS) & (dims < DIM)
    values = tl.load(source + token * token_stride + heads * head_stride + dims, mask=real)
    if LARGEST > 0:  # the cache has 8 bits
        values, scales = quantise(tl.where(real, values.to(tl.float32), 0.0), cache.dtype.element_ty, LARGEST)
        its_heads = tl.arange(0, HEADS_PADDED)
        place = cache_scales + its_heads.to(tl.int64) * scales_stride + slot
        tl.store(place, scales, mask=its_heads < NUM_HEADS)
    tl.store(cache + slot * (NUM_HEADS * DIM) + heads * DIM + dims, values, mask=real)


def store(source: torch.Tensor, cache: SlotCache, slots: torch.Tensor) -> None:
    """Copy source (T, Hkv, D), last dimension contiguous, to the cache's slots (T,). Skips negative slots."""
    tokens, heads, dim = source.shape
    assert source.stride(2) == 1
    assert cache.numbers.is_contiguous()
    assert slots.shape == (tokens,)
    if tokens == 0:
        return
    _store[(tokens,)](
        source, cache.numbers, cache.scales, slots, source.stride(0), source.stride(1), cache.scales_stride,
        LARGEST=cache.largest, NUM_HEADS=heads, DIM=dim,
        HEADS_PADDED=triton.next_power_of_2(heads), DIM_PADDED=triton.next_power_of_2(dim),
    )  # fmt: skip
