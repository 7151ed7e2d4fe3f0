"""Computes the RMS norm of groups with a gate, which follows a recurrence."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import early_launch

_NUMBERS = 1024  # of a program, if a group has fewer


@triton.jit(do_not_specialize=["num_groups"])
def _norm_gated(
    out, x, gate, weight, gate_stride, num_groups, eps,
    GROUPS: tl.constexpr, SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, ONE_WEIGHT: tl.constexpr,
    NORM_FIRST: tl.constexpr, BLOCK: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    groups = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # of all tokens
    numbers = tl.arange(0, SIZE_PADDED)[None, :]
    real = (groups < num_groups)[:, None] & (numbers < SIZE)
    tokens, of_token = (groups // GROUPS).to(tl.int64)[:, None], (groups % GROUPS)[:, None]
    places = groups.to(tl.int64)[:, None] * SIZE + numbers
    values = tl.load(x + places, mask=real, other=0.0).to(tl.float32)
    gates = tl.load(gate + tokens * gate_stride + of_token * SIZE + numbers, mask=real, other=0.0).to(tl.float32)
    gates *= tl.sigmoid(gates)
    if NORM_FIRST:
        squares = values * values
        values *= gates
    else:
        values *= gates
        squares = values * values
    values *= tl.rsqrt(tl.sum(squares, axis=1) / SIZE + eps)[:, None]
    values *= tl.load(weight + numbers + (0 if ONE_WEIGHT else of_token * SIZE), mask=real, other=0.0)
    tl.store(out + places, values.to(out.dtype.element_ty), mask=real)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, norm_first: bool
) -> torch.Tensor:
    """Do the same as `native.states.gated_norm`."""
    tokens, groups, size = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    out = torch.empty_like(x)
    padded = triton.next_power_of_2(size)
    block = max(1, _NUMBERS // padded)
    _norm_gated[(triton.cdiv(tokens * groups, block),)](
        out, x, gate, weight, gate.stride(0), tokens * groups, eps,
        GROUPS=groups, SIZE=size, SIZE_PADDED=padded, ONE_WEIGHT=weight.dim() == 1, NORM_FIRST=norm_first,
        BLOCK=block, num_warps=min(16, max(4, padded // 512)), **early_launch(),
    )  # fmt: skip
    return out
