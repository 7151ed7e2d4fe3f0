"""Builds the module for a projection. Only this file decides which kernel multiplies which weights.

The module has the attributes of torch's Linear: `in_features`, `out_features`, `weight` (the plain matrix), `bias`.
`quantize` rounds the weights of the module that `build_linear` returns, and `adapt` wraps it, to add adapters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.models.gpu_linear import GpuLinear, can_join, join_linears
from conveyor_engine.execution.models.packed_linear import NativeLinear, OneDnnLinear, PackedLinear
from conveyor_engine.execution.models.quantized.deferred import Deferred

Linear = nn.Linear | PackedLinear
Plain = nn.Linear | GpuLinear  # layers as models have them when `fuse` begins
Kind = Literal["native", "onednn", "torch"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """The properties of weights that decide which kernel computes a projection."""

    device: str  # torch's device type: cpu, cuda
    dtype: torch.dtype


def linear_kind(spec: LinearSpec) -> Kind:
    """Return the kernel for weights with these properties on this machine."""
    if spec.device != "cpu" or spec.dtype not in (torch.float32, torch.bfloat16):
        return "torch"
    if native.why_missing() is None and native.isa() != "generic":
        return "native"
    if spec.dtype == torch.bfloat16 and torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "onednn"
    return "torch"


def build_linear(linears: Sequence[Plain]) -> Linear:
    """Build one module for projections of the same input. Its output has their results side by side.

    The projections must be `stackable`.
    """
    assert stackable(linears)
    packed = [linear for linear in linears if isinstance(linear, GpuLinear)]
    if packed:
        return packed[0] if len(packed) == 1 else join_linears(packed)
    kind = linear_kind(LinearSpec(linears[0].weight.device.type, linears[0].weight.dtype))
    if kind == "torch" and len(linears) == 1:
        return linears[0]
    weights: list[torch.Tensor] = [linear.weight for linear in linears]
    if not all(isinstance(each, Deferred) for each in weights):
        weights = [each.read() if isinstance(each, Deferred) else each.data for each in weights]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    if kind == "torch":
        return build_plain(weight, bias)
    if kind == "onednn":
        return OneDnnLinear(weight, bias)
    return NativeLinear(weight, bias)


def stackable(linears: Sequence[Plain]) -> bool:
    """Return whether these are layers of one input size and one type, and all or none of them have a bias.

    They are plain ones, or have the same number of bits on a GPU.
    """
    if packed := [linear for linear in linears if isinstance(linear, GpuLinear)]:
        return len(packed) == len(linears) and can_join(packed)
    kinds = {(linear.in_features, linear.weight.dtype, linear.bias is None) for linear in linears}
    return len(kinds) == 1 and all(type(linear) is nn.Linear for linear in linears)


def build_plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Build torch's module with this weight (out, in) and bias (out,)."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear
