"""Linear layers over packed weights, which the kernels read once, in order, for any number of rows."""

from dataclasses import dataclass
from typing import Any

import torch

from conveyor_engine.execution.native import library

PANEL = 32  # outputs in one panel of packed weights


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weights of one linear layer in the kernels' own layout: panels of 32 outputs, zero padded."""

    data: torch.Tensor
    out_features: int
    in_features: int

    def product(self, dtype: torch.dtype, **others: Any) -> library.Linear:
        """Return the call for a product with inputs of this type, with `others` set too."""
        assert dtype == self.data.dtype
        return library.Linear(
            weight=self.data.data_ptr(), n=self.out_features, k=self.in_features, packed_k=self.in_features,
            dtype=library.DTYPES[dtype], **others,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """Weights of one linear layer as whole numbers of 8 or 4 bits: scale * (number - zero).

    data: bytes (panels, groups, bytes of a group), as conveyor_native.h describes them. Scales are float32 or bfloat16.
    """

    data: torch.Tensor
    out_features: int
    in_features: int
    bits: int
    scale_dtype: torch.dtype
    has_zeros: bool

    @classmethod
    def allocate(
        cls, shape: tuple[int, int], bits: int, group: int, scale_dtype: torch.dtype, has_zeros: bool = False
    ) -> "PackedIntegers":
        """Return weights of this shape (out, in) that are 0. group: how many inputs share a scale."""
        (out_features, in_features), panels = shape, -(-shape[0] // PANEL)
        assert bits in (4, 8)
        assert in_features % group == group % 32 == 0
        size = 4 * bits * group + PANEL * (scale_dtype.itemsize + 2 * has_zeros)
        data = library.zeros((panels, in_features // group, size), torch.uint8)
        return cls(data, out_features, in_features, bits, scale_dtype, has_zeros)

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale."""
        return self.in_features // self.data.shape[1]

    def fill(self, first: int, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Set the panels from `first` on: numbers, uint8 (out, in), scales and int16 zeros (out, groups).

        out: a multiple of PANEL. zeros: None for half of 2^bits.
        """
        panels, groups, group = len(numbers) // PANEL, self.data.shape[1], self.group
        assert scales.dtype == self.scale_dtype
        assert (zeros is not None) == self.has_zeros
        by_group = numbers.view(panels, PANEL, groups, group // 4, 4).permute(0, 2, 3, 1, 4)
        if self.bits == 4:
            pairs = by_group.reshape(panels, groups, group // 8, 2, 4 * PANEL)
            by_group = pairs[..., 0, :] | pairs[..., 1, :] << 4
        parts = [by_group.reshape(panels, groups, -1)]
        for each in (scales, zeros):
            if each is not None:
                parts.append(each.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8))
        torch.cat(parts, dim=2, out=self.data[first : first + panels])

    def product(self, dtype: torch.dtype, **others: Any) -> library.Linear:
        """Return the call for a product with inputs of this type, with `others` set too."""
        return library.Linear(
            weight=self.data.data_ptr(), n=self.out_features, k=self.in_features, packed_k=self.in_features,
            group=self.group, dtype=library.DTYPES[dtype], bits=self.bits,
            scale_dtype=library.DTYPES[self.scale_dtype], has_zeros=self.has_zeros, **others,
        )  # fmt: skip


Packed = PackedWeight | PackedIntegers


def pack_linear(weight: torch.Tensor) -> PackedWeight:
    """Pack weight (out, in), whose rows must be contiguous. The plain tensor is not kept."""
    data = library.zeros(packed_shape(weight), weight.dtype)
    pack_into(weight, data)
    return PackedWeight(data, *weight.shape)


def packed_shape(weight: torch.Tensor) -> tuple[int, int, int]:
    """Return the shape of the packed weight (out, in)."""
    out_features, in_features = weight.shape
    columns = in_features if weight.dtype == torch.float32 else in_features + in_features % 2
    return -(-out_features // PANEL), columns, PANEL


def pack_into(weight: torch.Tensor, data: torch.Tensor) -> None:
    """Pack weight (out, in), whose rows must be contiguous, into zeros of `packed_shape`."""
    assert weight.stride(1) == 1
    library.load().cv_pack_linear(
        weight.data_ptr(), data.data_ptr(), *weight.shape, weight.stride(0), library.DTYPES[weight.dtype]
    )


def unpack_linear(weight: PackedWeight) -> torch.Tensor:
    """Return the plain matrix (out, in) as a new tensor."""
    pair = 1 if weight.data.dtype == torch.float32 else 2  # neighbours of a row that are stored together
    panels = weight.data.view(weight.data.shape[0], -1, PANEL, pair)
    plain = panels.transpose(1, 2).reshape(-1, weight.data.shape[1])
    return plain[: weight.out_features, : weight.in_features].contiguous()


def unpack_integers(weight: PackedIntegers) -> torch.Tensor:
    """Return the plain matrix (out, in) that the numbers stand for, float32."""
    panels, groups, bits = len(weight.data), weight.data.shape[1], weight.bits
    size = weight.group * 4 * bits
    numbers = weight.data[..., :size].reshape(panels, groups, -1, 4 * PANEL)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=3)
    numbers = numbers.reshape(panels, groups, -1, PANEL, 4).permute(0, 3, 1, 2, 4).reshape(panels, PANEL, groups, -1)
    end = size + PANEL * weight.scale_dtype.itemsize
    scales = weight.data[..., size:end].contiguous().view(weight.scale_dtype).transpose(1, 2)
    zeros = torch.full((1, 1, 1), 1 << bits - 1, dtype=torch.int16)
    if weight.has_zeros:
        zeros = weight.data[..., end:].contiguous().view(torch.int16).transpose(1, 2)
    plain = (numbers.float() - zeros[..., None].float()) * scales[..., None].float()
    return plain.reshape(panels * PANEL, -1)[: weight.out_features]


def linear(x: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute the same as torch.nn.functional.linear: x (..., in) -> (..., out). Accumulates in float32."""
    rows = x.reshape(-1, weight.in_features)
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    assert bias is None or (bias.dtype == x.dtype and bias.is_contiguous())
    y = x.new_empty((*x.shape[:-1], weight.out_features))
    call = weight.product(
        x.dtype, x=rows.data_ptr(), bias=None if bias is None else bias.data_ptr(), y=y.data_ptr(),
        rows=rows.shape[0], x_stride=rows.stride(0), y_stride=weight.out_features,
    )  # fmt: skip
    library.load().cv_run_linear(call)
    return y
