"""Norms and activations as Triton kernels. Needs triton, so `elementwise` imports it where Triton runs."""

import torch

from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.models.torch_elementwise import TorchElementwise


class TritonElementwise(TorchElementwise):
    """The rotation stays torch's: `triton_layers.TritonAttention` fuses it into a larger kernel."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, offset)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return elementwise.silu_mul(x)
