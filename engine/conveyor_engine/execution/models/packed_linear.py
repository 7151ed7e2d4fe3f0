"""Linear layers for CPUs, with weights stored in the order in which the kernel reads them. Made by `linear`.

`gpu_linear` has the one for GPUs.

There are two kernels:
- Our own kernel reads the weights once, in order, also for a single row, and uses AMX tiles if the CPU has them. If all
  linear layers of a decoder layer use it, one call can compute many such layers (`native.layer`). Our kernel also
  computes bfloat16 on CPUs without bfloat16 instructions, where oneDNN's emulation is several times slower.
- oneDNN's kernel computes bfloat16 layers if our own kernels are missing or have no vector instructions for this CPU.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn

from conveyor_engine.execution import native
from conveyor_engine.execution.models.quantized.deferred import Deferred
from conveyor_engine.execution.models.quantized.rounding import pack_grid

_ONEDNN_ROWS = 32  # oneDNN optimizes its layout for this number of rows; other numbers work too


class PackedLinear(nn.Module, ABC):
    """A linear layer, x (..., in) -> (..., out). It does not keep the plain matrix; `weight` unpacks it."""

    def __init__(self, shape: tuple[int, int], bias: torch.Tensor | None) -> None:
        """shape: (out, in)."""
        super().__init__()
        self.out_features, self.in_features = shape
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @property
    @abstractmethod
    def weight(self) -> torch.Tensor:
        """Return the plain matrix (out, in). Each access unpacks a new copy, as large as the packed matrix."""


class NativeLinear(PackedLinear):
    """A linear layer that uses the compiled kernels."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """weight: the plain matrix. If it is deferred, call `read_stored` before the layer computes answers."""
        super().__init__((weight.shape[0], weight.shape[1]), bias)
        self._stored = weight if isinstance(weight, Deferred) else None
        self._packed: native.Packed | None = None if self._stored is not None else native.pack_linear(weight)
        self._dtype = weight.dtype

    @property
    def packed(self) -> native.Packed:
        """Return the packed matrix; that of random numbers while the weights are deferred, for checks."""
        if self._packed is None:
            assert self._stored is not None
            self._packed = native.pack_linear(self._stored.now())
        return self._packed

    @packed.setter
    def packed(self, packed: native.Packed) -> None:
        self._packed = packed

    def read_stored(self) -> bool:
        """Pack deferred weights: as whole numbers if the checkpoint has these. Return whether they were deferred."""
        stored, self._stored = self._stored, None
        if stored is not None:
            self._packed = None
            self._packed = pack_stored(stored) or native.pack_linear(stored.read())
        return stored is not None

    @property
    def weight(self) -> torch.Tensor:
        if isinstance(self.packed, native.PackedIntegers):
            return native.unpack_integers(self.packed).to(self._dtype)
        return native.unpack_linear(self.packed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return native.linear(x, self.packed, self.bias)


def pack_stored(weight: Deferred) -> native.PackedIntegers | None:
    """Return the whole numbers of the checkpoint; None if the kernels cannot keep them."""
    grid = weight.find_grid(keeps_floats=False)
    return None if grid is None else pack_grid(grid, weight.shape[-1])


class PackedEmbedding(nn.Module):
    """An embedding table as whole numbers, which may be those of the head. It has the attributes of torch's class."""

    def __init__(self, packed: native.PackedIntegers, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = packed.out_features, packed.in_features
        self._packed, self._dtype = packed, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Return the plain table. Each access unpacks a new copy."""
        return native.unpack_integers(self._packed).to(self._dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        rows = native.unpack_integers(self._packed, tokens.flatten()).to(self._dtype)
        return rows.view(*tokens.shape, self.embedding_dim)


class OneDnnLinear(PackedLinear):
    """A linear layer that uses oneDNN, for bfloat16 if compiled kernels or their vector instructions are missing."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__((weight.shape[0], weight.shape[1]), bias)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ONEDNN_ROWS)

    @property
    def weight(self) -> torch.Tensor:
        plain: torch.Tensor = self._packed.to_dense()
        return plain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out
