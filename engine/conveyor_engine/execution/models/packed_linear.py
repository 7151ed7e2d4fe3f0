"""Linear layers whose weights lie in the order their kernel reads them. Made by `linear`, for CPUs.

There are two kernels. Our own reads weights once, in order, for one row too, by tiles where there is AMX, and makes a
layer one call; it takes bfloat16 where the CPU has no instructions for it, which oneDNN emulates several times slower.
oneDNN's stands in for bfloat16 where ours has no vectors.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn

from conveyor_engine.execution import native

_ONEDNN_ROWS = 32  # the number of rows for which oneDNN chooses its layout; others work too


class PackedLinear(nn.Module, ABC):
    """x (..., in) -> (..., out). The plain matrix is not kept; `weight` unpacks it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """The plain matrix (out, in): a new one each time, as large as the packed one, in one pass over it."""


class NativeLinear(PackedLinear):
    """A linear layer that uses the compiled kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self.packed = native.pack_linear(weight)

    @property
    def weight(self) -> torch.Tensor:
        return native.unpack_linear(self.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return native.linear(x, self.packed, self.bias)


class OneDnnLinear(PackedLinear):
    """A linear layer that uses oneDNN, for bfloat16 without compiled kernels, or with kernels without vectors."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__(weight, bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)

    @property
    def weight(self) -> torch.Tensor:
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out
