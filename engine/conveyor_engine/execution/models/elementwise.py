"""Choose who computes norms, rotary embeddings and activations: the compiled kernels, Triton's, or torch.

`layers` and `recognise` call this. A compiled kernel passes over its input once and rounds once.
"""

from typing import Protocol

import torch

from conveyor_engine.execution import kernels, native
from conveyor_engine.execution.models.torch_elementwise import TorchElementwise


class Elementwise(Protocol):
    """The operations of both. See `native.elementwise` for shapes."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        """x / rms(x) * (offset + weight) over the last dimension."""
        ...

    def rope(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """x (T, heads, D) rotated by cos, sin (1, T, R), R <= D."""
        ...

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of x (..., 2 * size), gate first."""
        ...


def choose_elementwise(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """The compiled kernels, or Triton's, if they can take tensors of this type there; else torch."""
    if device.type == "cpu" and native.why_missing() is None and native.supports(dtype):
        return native
    if kernels.why_missing(device) is None:
        from conveyor_engine.execution.models.triton_elementwise import TritonElementwise  # needs triton

        return TritonElementwise()
    return TorchElementwise()
