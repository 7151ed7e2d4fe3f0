"""Multiplies each head by a matrix of its own, in one call for all heads."""

import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.packed import pack_into, packed_shape


class PackedHeads:
    """A matrix (out, in) for each head, in the kernels' own layout."""

    def __init__(self, weights: torch.Tensor) -> None:
        """weights: (H, out, in), whose rows must be contiguous. The plain tensor is not kept."""
        self._heads, self._out, self._in = weights.shape
        self._packed = library.zeros((self._heads, *packed_shape(self._out, self._in, weights.dtype)), weights.dtype)
        for weight, place in zip(weights, self._packed, strict=True):
            pack_into(weight, place)

    def run(self, x: torch.Tensor, y: torch.Tensor, first: int = 0) -> None:
        """Write the products of x (T, H, in) to y (T, H, out). Strides are free, except for the last dimension.

        The heads begin with number `first`, and may be fewer than there are matrices.
        """
        tokens, count, _ = x.shape
        assert x.shape == (tokens, count, self._in)
        assert y.shape == (tokens, count, self._out)
        assert 0 <= first <= self._heads - count
        assert x.stride(2) == y.stride(2) == 1
        assert x.dtype == y.dtype == self._packed.dtype
        call = library.Linear(
            x=x.data_ptr(), weight=self._packed[first].data_ptr(), y=y.data_ptr(), rows=tokens, n=self._out, k=self._in,
            packed_k=self._in, x_stride=x.stride(0), y_stride=y.stride(0), dtype=library.DTYPES[x.dtype],
        )  # fmt: skip
        steps = x.stride(1) * x.itemsize, self._packed[0].nbytes, y.stride(1) * y.itemsize
        library.load().cv_run_linears(library.Linears(call, count, *steps))
