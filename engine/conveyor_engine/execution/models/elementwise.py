"""Norms, rotary embeddings and activations, computed by the compiled CPU kernels, by Triton's, or by torch.

Used by `layers` and `recognise`. A compiled kernel reads its input once and rounds once.
"""

from typing import Protocol

import torch
from torch.nn import functional

from conveyor_engine.execution import kernels, native


class Elementwise(Protocol):
    """The operations that all three implementations provide. See `native.elementwise` for shapes."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """Return x / rms(x) * (offset + weight) over the last dimension."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x (T, heads, D) by cos, sin (1, T, R), R <= D."""
        ...

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, (..., size), for x (..., 2 * size) whose first half is the gate."""
        ...


class TorchElementwise:
    """Elementwise operations with torch, on any device."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        if not offset:
            return functional.rms_norm(x, weight.shape, weight, eps)
        # In x's type, offset + weight would lose the weight's last bits. So this computes in float32.
        return functional.rms_norm(x.float(), weight.shape, offset + weight.float(), eps).to(x.dtype)

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)  # (T, 1, R): the same for all heads
        rotary = cos.shape[-1]
        part = x if rotary == x.shape[-1] else x[..., :rotary]
        first, second = part.chunk(2, dim=-1)
        rotated = torch.addcmul(part * cos, torch.cat((-second, first), dim=-1), sin)
        return rotated if part is x else torch.cat((rotated, x[..., rotary:]), dim=-1)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up


class TritonElementwise(TorchElementwise):
    """Triton's norms and activations. The rotation uses torch, because `TritonAttention` fuses its own version."""

    def __init__(self) -> None:
        from conveyor_engine.execution.kernels import elementwise  # needs triton

        self.rms_norm = elementwise.rms_norm  # type: ignore[method-assign]
        self.silu_mul = elementwise.silu_mul  # type: ignore[method-assign]


def choose_elementwise(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """Return the compiled kernels or Triton's if they support the device and the type; otherwise torch."""
    if device.type == "cpu" and native.why_missing() is None and native.supports(dtype):
        return native
    if kernels.why_missing(device) is None:
        return TritonElementwise()
    return TorchElementwise()
