"""Mixtures of experts over packed weights: one call sorts tokens by expert, multiplies and adds up."""

from dataclasses import dataclass, replace

import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.packed import Packed, PackedWeight, pack_into, packed_shape


@dataclass(frozen=True, slots=True)
class PackedStack:
    """A matrix of each expert, all alike, one behind the other in `data`. first: that of the first expert."""

    data: torch.Tensor
    first: Packed

    @classmethod
    def pack(cls, weights: torch.Tensor) -> "PackedStack":
        """Pack weights (experts, out, in). The plain tensor is not kept."""
        number, out_features, in_features = weights.shape
        data = library.zeros((number, *packed_shape(out_features, in_features, weights.dtype)), weights.dtype)
        for weight, place in zip(weights, data, strict=True):
            pack_into(weight, place)
        return cls(data, PackedWeight(data[0], *weights.shape[1:]))

    @classmethod
    def allocate(cls, first: Packed, count: int) -> "PackedStack":
        """Return `count` matrices like `first`, of zeros."""
        data = library.zeros((count, *first.data.shape), first.data.dtype)
        return cls(data, replace(first, data=data[0]))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, expert: int) -> Packed:
        return replace(self.first, data=self.data[expert])

    def product(self, dtype: torch.dtype) -> library.Linear:
        """Return the first expert's call, without inputs and outputs."""
        return self.first.product(dtype, x_stride=self.first.in_features, y_stride=self.first.out_features)


class PackedExperts:
    """The weights of gated MLPs in the kernels' own layout. `gate_up` and `down` may be replaced by rounded ones."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """gate_up: (experts, 2 * size, hidden). down: (experts, hidden, size). The plain tensors are not kept."""
        assert gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
        self.gate_up, self.down = PackedStack.pack(gate_up), PackedStack.pack(down)
        self._dtype = down.dtype

    def run(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts: x (T, hidden), chosen and shares (T, k) -> (T, hidden).

        A number in `chosen` that no expert has adds nothing.
        """
        tokens, per_token = chosen.shape
        assert x.shape == (tokens, self.gate_up.first.in_features)
        assert x.dtype == self._dtype
        x, chosen, shares = x.contiguous(), chosen.long().contiguous(), shares.float().contiguous()
        y = torch.empty_like(x)
        call = library.Experts(
            *(x.data_ptr(), chosen.data_ptr(), shares.data_ptr(), y.data_ptr()),
            *(tokens, len(self.down), per_token, self.gate_up.data[0].nbytes, self.down.data[0].nbytes),
            *(self.gate_up.product(x.dtype), self.down.product(x.dtype)),
        )
        library.load().cv_run_experts(call)
        return y
