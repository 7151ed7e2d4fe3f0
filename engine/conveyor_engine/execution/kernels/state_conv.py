"""Computes short causal convolutions over the sequences of a step, and the last inputs that rows keep for the next.

A program computes some channels of one decode, or of a tile of a prompt's tokens. Tokens before the tile are read
again. Only the program of a sequence's first tile reads and writes the sequence's state.
"""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.paged_attention import _find_sequence
from conveyor_engine.execution.kernels.part import early_launch
from conveyor_engine.execution.state_rows import StateRows

MOST_TAPS = 8
_TOKENS, _CHANNELS = 16, 128  # of a tile of a prompt; not fewer tokens than taps
_CHANNELS_OF_DECODES = 256


@triton.jit(
    do_not_specialize=["num_decodes", "num_prompts"], do_not_specialize_on_alignment=["query_start", "rows", "is_new"]
)
def _convolve(
    out, state, x, before, after, weight, bias, query_start, rows, is_new, x_stride, num_decodes, num_prompts,
    CHANNELS: tl.constexpr, TAPS: tl.constexpr, TAPS_PADDED: tl.constexpr, SILU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    """A grid with prompts has BLOCK_T >= TAPS."""
    channels = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    real = channels < CHANNELS
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    if tile < num_decodes:
        seq = tile
        first = 0
    else:
        prompts = query_start + num_decodes
        first_of_all = tl.load(prompts)
        prompt = _find_sequence(prompts, tile - num_decodes, num_prompts, first_of_all, BLOCK_T)
        seq = num_decodes + prompt
        begins = (tl.load(query_start + seq) - first_of_all) // BLOCK_T + prompt
        first = (tile - num_decodes - begins) * BLOCK_T
    start = tl.load(query_start + seq)
    length = tl.load(query_start + seq + 1) - start
    if first >= length:
        return
    tokens = first + tl.arange(0, BLOCK_T)
    held = state + tl.load(rows + seq) * (TAPS * CHANNELS) + channels
    lowest = (tl.load(is_new + seq).to(tl.int32) - 1) * TAPS  # the state has inputs from here to -1
    inputs = start.to(tl.int64) * x_stride + channels

    total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=real, other=0.0)[None, :]
    for tap in tl.static_range(TAPS):
        at = tokens - (TAPS - 1 - tap)
        value = _read(x, before, inputs, x_stride, at, length, real).to(tl.float32)
        from_state = ((at >= lowest) & (at < 0))[:, None] & real[None, :]
        value += tl.load(held[None, :] + (TAPS + at)[:, None] * CHANNELS, mask=from_state, other=0.0).to(tl.float32)
        value *= tl.load(weight + tap * CHANNELS + channels, mask=real, other=0.0)[None, :]
        total += value
    if SILU:
        total *= tl.sigmoid(total)
    is_real = (tokens < length)[:, None] & real[None, :]
    if after is not None:
        total *= tl.load(after + inputs[None, :] + tokens[:, None].to(tl.int64) * x_stride, mask=is_real, other=0.0)
    places = (start + tokens).to(tl.int64)[:, None] * CHANNELS + channels[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=is_real)

    if first == 0:
        taps = tl.arange(0, TAPS_PADDED)
        last = length - TAPS + taps
        of_taps = (taps < TAPS)[:, None] & real[None, :]
        kept = _read(x, before, inputs, x_stride, tl.where(taps < TAPS, last, -1), length, real)
        were_kept = of_taps & ((last >= lowest) & (last < 0))[:, None]
        kept += tl.load(held[None, :] + (TAPS + last)[:, None] * CHANNELS, mask=were_kept, other=0.0)
        tl.debug_barrier()  # all loads of the state must precede the stores
        tl.store(held[None, :] + taps[:, None] * CHANNELS, kept, mask=of_taps)


@triton.jit
def _read(x, before, inputs, x_stride, at, length, real):
    """Return the inputs at these places of the sequence, in the type of x; zeros where it has none."""
    places = inputs[None, :] + at[:, None].to(tl.int64) * x_stride
    is_real = ((at >= 0) & (at < length))[:, None] & real[None, :]
    value = tl.load(x + places, mask=is_real, other=0.0)
    if before is not None:
        gate = tl.load(before + places, mask=is_real, other=0.0)
        value = (value.to(tl.float32) * gate.to(tl.float32)).to(x.dtype.element_ty)
    return value


def conv(
    rows: StateRows,
    x: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    gates: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Do the same as `native.states.conv`. The state keeps the inputs after the first gate, rounded to its type."""
    channels, taps = x.shape[1], len(weight)
    assert x.dtype == state.dtype
    assert state.is_contiguous()
    assert weight.shape == state.shape[1:] == (taps, channels)
    assert all(each.stride() == x.stride() for each in gates or ())
    assert x.stride(1) == 1
    assert taps <= MOST_TAPS
    out = rows.make_results(x, channels)
    only_decodes = rows.num_prompts == 0
    block_t, block_c = (1, _CHANNELS_OF_DECODES) if only_decodes else (_TOKENS, _CHANNELS)
    tiles = rows.num_decodes + (0 if only_decodes else rows.most_prompt_tokens // block_t + rows.num_prompts)
    before, after = gates or (None, None)
    _convolve[(tiles, triton.cdiv(channels, block_c))](
        out, state, x, before, after, weight, bias, rows.query_start, rows.rows, rows.is_new,
        x.stride(0), rows.num_decodes, rows.num_prompts,
        CHANNELS=channels, TAPS=taps, TAPS_PADDED=triton.next_power_of_2(taps), SILU=silu,
        BLOCK_T=block_t, BLOCK_C=block_c, num_warps=2 if only_decodes else 4, **early_launch(),
    )  # fmt: skip
    return out
