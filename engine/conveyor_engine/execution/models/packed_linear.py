"""A linear layer whose weights lie in the order its kernel reads them. Made by `fuse`, for CPUs.

Two kernels: oneDNN's, which knows AMX, and our own, which keeps bfloat16 weights as they are where the CPU
has no bfloat16 instructions (oneDNN emulates them there, several times slower), and reads them once for one row.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import nn

from conveyor_engine.execution import native

Kind = Literal["native", "onednn"]
_ONEDNN_ROWS = 32  # the number of rows for which oneDNN chooses its layout; others work too


def linear_kind(dtype: torch.dtype) -> Kind | None:
    """The kernel for weights of this type on this CPU; None = leave nn.Linear alone."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    has_vectors = native.why_missing() is None and native.isa() != "generic"
    if has_vectors and not (dtype == torch.bfloat16 and native.has_amx_bf16()):
        return "native"
    if dtype == torch.bfloat16 and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "onednn"
    return None


class PackedLinear(nn.Module):
    """x (..., in) -> (..., out), several layers of the same input stacked into one. The originals are not kept."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__()
        weights = [linear.weight.data for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        biases = [linear.bias.data for linear in linears if linear.bias is not None]
        assert len(biases) in (0, len(linears))
        self.bias = nn.Parameter(torch.cat(biases), requires_grad=False) if biases else None
        self.out_features, self.in_features = weight.shape
        kind = linear_kind(weight.dtype)
        assert kind is not None
        self._native = native.pack_linear(weight) if kind == "native" else None
        self._onednn = None if self._native else torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._native is not None:
            return native.linear(x, self._native, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
        return out

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
