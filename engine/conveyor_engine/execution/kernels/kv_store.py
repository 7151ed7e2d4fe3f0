"""Writes a step's keys and values to their slots in the paged caches."""

# Triton compiles the kernels from their source: annotations mean other things to it.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl


@triton.jit
def _store(
    source, cache, slots,
    token_stride, head_stride,
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
    tl.store(cache + slot * (NUM_HEADS * DIM) + heads * DIM + dims, values, mask=real)


def store(source: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Copies source (T, Hkv, D), last dimension contiguous, to cache (slots, Hkv, D) at slots (T,); negative = skip."""
    tokens, heads, dim = source.shape
    assert source.stride(2) == 1
    assert cache.is_contiguous()
    assert slots.shape == (tokens,)
    if tokens == 0:
        return
    _store[(tokens,)](
        source, cache, slots, source.stride(0), source.stride(1),
        NUM_HEADS=heads, DIM=dim,
        HEADS_PADDED=triton.next_power_of_2(heads), DIM_PADDED=triton.next_power_of_2(dim),
    )  # fmt: skip
