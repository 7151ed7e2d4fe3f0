"""Linear layers over packed weights, which the kernels read once, in order, for any number of rows."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from conveyor_engine.execution.native import library

PANEL = 32  # outputs in one panel of packed weights
SUPER = 256  # inputs whose scales in int8 share a factor
_BYTE = 8  # bits


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
    """Weights of one linear layer as whole numbers of 4, 5, 6 or 8 bits: scale * (number - zero), or - minimum.

    data: bytes (panels, bytes of a panel), as conveyor_native.h describes them. group: how many inputs share a scale.
    """

    data: torch.Tensor
    out_features: int
    in_features: int
    bits: int
    group: int
    scale_dtype: torch.dtype
    has_zeros: bool
    has_minima: bool

    @classmethod
    def allocate(
        cls, shape: tuple[int, int], bits: int, group: int, scale_dtype: torch.dtype, *, has_zeros: bool = False,
        has_minima: bool = False,
    ) -> "PackedIntegers":  # fmt: skip
        """Return weights of this shape (out, in) that are 0."""
        (out_features, in_features), panels = shape, -(-shape[0] // PANEL)
        assert bits in (4, 5, 6, 8)
        assert in_features % group == group % (32 if bits == 5 else 16) == 0
        assert scale_dtype != torch.int8 or in_features % SUPER == SUPER % group == 0
        empty = torch.empty(0, dtype=torch.uint8)
        weight = cls(empty, out_features, in_features, bits, group, scale_dtype, has_zeros, has_minima)
        factors = in_features // SUPER * PANEL * 2 * (1 + has_minima) if scale_dtype == torch.int8 else 0
        size = in_features // group * weight._group_bytes + factors
        return replace(weight, data=library.zeros((panels, size), torch.uint8))

    @property
    def _group_bytes(self) -> int:
        return 4 * self.bits * self.group + PANEL * (self.scale_dtype.itemsize + 2 * self.has_zeros + self.has_minima)

    def split(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `count` panels from `first` on as two views: (panels, groups, bytes of a group), and their factors."""
        groups, panels = self.in_features // self.group, self.data[first : first + count]
        end = groups * self._group_bytes
        return panels[:, :end].view(count, groups, self._group_bytes), panels[:, end:]

    def fill(
        self, first: int, numbers: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None = None,
        minima: torch.Tensor | None = None, factors: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        """Set the panels from `first` on. numbers: uint8 (out, in), where out is a multiple of PANEL.

        scales, int16 zeros and int8 minima: (out, groups). zeros: None for half of 2^bits, and with minima.
        factors: float16 (out, in / SUPER, 1 or 2), of int8 scales, and of minima.
        """
        panels, group = len(numbers) // PANEL, self.group
        assert scales.dtype == self.scale_dtype
        assert (zeros is not None, minima is not None) == (self.has_zeros, self.has_minima)
        by_group = numbers.view(panels, PANEL, -1, group // 4, 4).permute(0, 2, 3, 1, 4)
        planes = [by_group] if self.bits == _BYTE else [_pack(by_group & 15, 4)]
        if 4 < self.bits < _BYTE:
            planes.append(_pack(by_group >> 4, self.bits - 4))
        parts = [plane.reshape(panels, self.in_features // group, -1) for plane in planes]
        for each in (scales, zeros, minima):
            if each is not None:
                parts.append(each.view(panels, PANEL, -1).transpose(1, 2).contiguous().view(torch.uint8))
        groups, behind = self.split(first, panels)
        groups.copy_(torch.cat(parts, dim=2))
        if factors is not None:
            in_order = factors.view(panels, PANEL, *factors.shape[1:]).movedim(1, 3).flatten(1)
            behind.copy_(in_order.contiguous().view(torch.uint8))

    def product(self, dtype: torch.dtype, **others: Any) -> library.Linear:
        """Return the call for a product with inputs of this type, with `others` set too."""
        return library.Linear(
            weight=self.data.data_ptr(), n=self.out_features, k=self.in_features, packed_k=self.in_features,
            group=self.group, dtype=library.DTYPES[dtype], bits=self.bits,
            scale_dtype=library.SCALE_DTYPES[self.scale_dtype], has_zeros=self.has_zeros, has_minima=self.has_minima,
            **others,
        )  # fmt: skip


Packed = PackedWeight | PackedIntegers


def pack_linear(weight: torch.Tensor) -> PackedWeight:
    """Pack weight (out, in), whose rows must be contiguous. The plain tensor is not kept."""
    out_features, in_features = weight.shape
    packed = allocate(out_features, in_features, weight.dtype)
    pack_into(weight, packed.data)
    return packed


def allocate(out_features: int, in_features: int, dtype: torch.dtype) -> PackedWeight:
    """Return packed weights of this shape that are 0."""
    data = library.zeros(packed_shape(out_features, in_features, dtype), dtype)
    return PackedWeight(data, out_features, in_features)


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """Return the shape of packed weights (out, in)."""
    columns = in_features if dtype == torch.float32 else in_features + in_features % 2
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


def unpack_integers(weight: PackedIntegers, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Return what the numbers stand for, float32: the plain matrix (out, in), or only these rows of it."""
    panels, bits, group = len(weight.data), weight.bits, weight.group
    rows = torch.arange(weight.out_features) if rows is None else rows
    panel, lane = rows // PANEL, rows % PANEL
    groups, behind = weight.split(0, panels)
    types = [weight.scale_dtype, *[torch.int16] * weight.has_zeros, *[torch.int8] * weight.has_minima]
    numbers, *others = groups.split_with_sizes([4 * bits * group, *(PANEL * dtype.itemsize for dtype in types)], dim=2)
    scales, *starts = (
        part.view(panels, -1, PANEL, dtype.itemsize)[panel, :, lane].view(dtype)[..., 0].float()
        for part, dtype in zip(others, types, strict=True)
    )
    if weight.scale_dtype == torch.int8:
        factors = behind.view(panels, -1, 1 + weight.has_minima, PANEL, 2)[panel, :, :, lane].view(torch.float16)
        wide = factors[..., 0].float().repeat_interleave(SUPER // group, 1)  # (rows, groups, 1 or 2)
        scales, starts = scales * wide[..., 0], [start * wide[..., 1] for start in starts]
    found = numbers.view(panels, scales.shape[1], -1, PANEL, 4)[panel, :, :, lane]
    if bits < _BYTE:
        low, high = found.tensor_split([group // 8], dim=2)
        found = _unpack(low, 4)
        if bits > 4:
            found |= _unpack(high, bits - 4) << 4
    values = found.flatten(2).float()
    if weight.has_minima:
        values = values * scales[..., None] - starts[0][..., None]
    else:
        values = (values - (starts[0][..., None] if weight.has_zeros else 1 << bits - 1)) * scales[..., None]
    return values.flatten(1)


def _pack(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack numbers (panels, groups, quads, PANEL, 4) of so few bits: (panels, groups, quads * bits / 8, PANEL, 4)."""
    together = numbers.reshape(*numbers.shape[:2], -1, _BYTE // bits, *numbers.shape[3:])
    packed = together[:, :, :, 0].clone()
    for place in range(1, _BYTE // bits):
        packed |= together[:, :, :, place] << place * bits
    return packed


def _unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the numbers (rows, groups, quads, 4) in bytes (rows, groups, quads * bits / 8, 4)."""
    shifts = torch.arange(0, _BYTE, bits, dtype=torch.uint8)[:, None]
    return (packed[:, :, :, None] >> shifts & (1 << bits) - 1).flatten(2, 3)


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
