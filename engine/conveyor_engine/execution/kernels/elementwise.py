"""Kernels for a layer's operations between the matrix products: RMSNorm with the residual, and SiLU times up."""

# Triton compiles the kernels from their source and interprets annotations differently, so they have none.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

import torch
import triton
import triton.language as tl

from conveyor_engine.execution.kernels.part import early_launch

_SILU_BLOCK = 1024


@triton.jit
def _rms_norm(
    x, residual, weight, added, out,
    eps, offset,
    SIZE: tl.constexpr, SIZE_PADDED: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BEGINS_EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, SIZE_PADDED)
    real = columns < SIZE
    weights = offset + tl.load(weight + columns, mask=real, other=0.0).to(tl.float32)
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    values = tl.load(x + row + columns, mask=real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row + columns, mask=real, other=0.0).to(tl.float32)
        rounded = values.to(added.dtype.element_ty)
        tl.store(added + row + columns, rounded, mask=real)
        values = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    tl.store(out + row + columns, (values * scale * weights).to(out.dtype.element_ty), mask=real)


@triton.jit
def _silu_mul(x, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, BEGINS_EARLY: tl.constexpr):
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gate = tl.load(x + row * (2 * SIZE) + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + SIZE + columns, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=real)


@triton.jit
def _clamped_glu(x, out, alpha, limit, SIZE: tl.constexpr, BLOCK: tl.constexpr, BEGINS_EARLY: tl.constexpr):
    if BEGINS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gate = tl.load(x + row * (2 * SIZE) + 2 * columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(x + row * (2 * SIZE) + 2 * columns + 1, mask=real, other=0.0).to(tl.float32)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    values = (up + 1) * gate * tl.sigmoid(gate * alpha)
    tl.store(out + row * SIZE + columns, values.to(out.dtype.element_ty), mask=real)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """Return x / rms(x) * (offset + weight) over the last dimension of x (..., size), contiguous."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch_norm(x, None, weight, None, out, eps, offset)
    return out


def add_rms_norm(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return residual + x, both (..., size), and the `rms_norm` of this sum."""
    residual, x = residual.contiguous(), x.contiguous()
    added, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, weight, added, out, eps, offset)
    return added, out


def _launch_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    added: torch.Tensor | None,
    out: torch.Tensor,
    eps: float,
    offset: float,
) -> None:
    size = x.shape[-1]
    padded = triton.next_power_of_2(size)
    _rms_norm[(x.numel() // size,)](
        x, residual, weight, added, out, eps, offset,
        SIZE=size, SIZE_PADDED=padded, HAS_RESIDUAL=residual is not None,
        num_warps=min(16, max(1, padded // 512)), **early_launch(),
    )  # fmt: skip


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, (..., size), for contiguous x (..., 2 * size) whose first half is the gate."""
    assert x.is_contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    grid = (out.numel() // size, triton.cdiv(size, _SILU_BLOCK))
    _silu_mul[grid](x, out, SIZE=size, BLOCK=_SILU_BLOCK, **early_launch())
    return out


def clamped_glu(x: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return (up + 1) * gate * sigmoid(alpha * gate), (..., size), as gpt-oss does, with both clamped by `limit`.

    x: (..., 2 * size), contiguous, with gate and up in turns.
    """
    assert x.is_contiguous()
    size = x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], size))
    grid = (out.numel() // size, triton.cdiv(size, _SILU_BLOCK))
    _clamped_glu[grid](x, out, alpha, limit, SIZE=size, BLOCK=_SILU_BLOCK, **early_launch())
    return out
