"""Linear layers over packed weights, which the kernels read once, in order, for any number of rows."""

from dataclasses import dataclass

import torch

from conveyor_engine.execution.native import library

PANEL = 32  # outputs in one panel of packed weights


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights of one linear layer in the kernels' own layout: panels of 32 outputs, zero padded."""

    data: torch.Tensor
    out_features: int
    in_features: int


def pack_linear(weight: torch.Tensor) -> PackedWeight:
    """Pack weight (out, in), whose rows must be contiguous. The plain tensor is not kept."""
    out_features, in_features = weight.shape
    assert weight.stride(1) == 1
    columns = in_features if weight.dtype == torch.float32 else in_features + in_features % 2
    data = library.zeros((-(-out_features // PANEL), columns, PANEL), weight.dtype)
    library.load().cv_pack_linear(
        weight.data_ptr(), data.data_ptr(), out_features, in_features, weight.stride(0), library.DTYPES[weight.dtype]
    )
    return PackedWeight(data, out_features, in_features)


def unpack_linear(weight: PackedWeight) -> torch.Tensor:
    """Return the plain matrix (out, in) as a new tensor."""
    pair = 1 if weight.data.dtype == torch.float32 else 2  # neighbours of a row that are stored together
    panels = weight.data.view(weight.data.shape[0], -1, PANEL, pair)
    plain = panels.transpose(1, 2).reshape(-1, weight.data.shape[1])
    return plain[: weight.out_features, : weight.in_features].contiguous()


def linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the same as torch.nn.functional.linear: x (..., in) -> (..., out). Accumulates in float32."""
    rows = x.reshape(-1, weight.in_features)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    assert x.dtype == weight.data.dtype
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty((*x.shape[:-1], weight.out_features))
    call = library.Linear(
        *(rows.data_ptr(), weight.data.data_ptr(), None if bias is None else bias.data_ptr(), None, y.data_ptr()),
        *(rows.shape[0], weight.out_features, weight.in_features, weight.in_features),
        *(rows.stride(0), weight.out_features, library.DTYPES[rows.dtype]),
    )
    library.load().cv_run_linear(call)
    return y
