"""A linear layer for GPUs whose weights have 4 or 8 bits in memory. `gpu_packing` makes it from torch's."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.kernels.weights import Weights, has_blocks, have_one_order, join_weights
from conveyor_engine.execution.models.packed_linear import PackedLinear


class GpuLinear(PackedLinear):
    """A linear layer, x (..., in) -> (..., out), with weights that Triton's kernels widen while they multiply."""

    def __init__(self, packed: Weights, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """dtype: of inputs and outputs."""
        from conveyor_engine.execution.kernels import packed_product, packed_row  # needs triton

        super().__init__((packed.out_features, packed.in_features), bias)
        self.packed, self.dtype = packed, dtype
        self._multiply, self._restore = packed_product.multiply, packed_product.restore
        self._multiply_row = packed_row.multiply_packed_row

    @property
    def weight(self) -> torch.Tensor:
        restored = self._restore(self.packed, self.dtype)
        return restored if self.packed.order is None else restored[:, self.packed.order.argsort()]

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what layers that can be joined have in common, if their groups fit too."""
        return self.in_features, self.bias is None, *self.packed.form

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        if len(rows) == 1:
            return self.multiply_row(rows).view(*x.shape[:-1], self.out_features)
        return self._multiply(rows, self.packed, self.bias).view(*x.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return residual + what the layer computes of x."""
        rows = x.reshape(-1, self.in_features)
        out: torch.Tensor = self._multiply(rows, self.packed, self.bias, residual.reshape(-1, self.out_features))
        return out.view(residual.shape)

    def multiply_row(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        """Return what `few_rows.multiply_rows` computes of x (1, in)."""
        return self._multiply_row(x.contiguous(), self.packed, self.bias, **options)


def can_join(linears: Sequence[GpuLinear]) -> bool:
    """Return whether the layers have one kind, one order of inputs, and one number of groups or else one group.

    Those with scales in blocks may have different numbers of bits. Joined, they have 8.
    """
    groups = {len(linear.packed.scales) for linear in linears}
    if not have_one_order([linear.packed for linear in linears]):
        return False
    if len({linear.kind for linear in linears}) == 1:
        return len(groups - {1}) <= 1
    is_alike = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
    return is_alike and all(has_blocks(linear.packed) for linear in linears)


def join_linears(linears: Sequence[GpuLinear]) -> GpuLinear:
    """Return one layer with the outputs of all side by side. `can_join` must be true."""
    biases = [linear.bias.data for linear in linears if linear.bias is not None]
    packed = join_weights([linear.packed for linear in linears])
    return GpuLinear(packed, torch.cat(biases) if biases else None, linears[0].dtype)


def list_variants(model: nn.Module) -> tuple[int, ...]:
    """Return numbers of rows that reach each variant of the kernels for several rows; none if no layer uses them.

    Tiles have 16, 32 or 64 rows. A product of several tiles of rows may not be divided along its inputs.
    """
    return (16, 32, 64, 256) if any(isinstance(part, GpuLinear) for part in model.modules()) else ()
