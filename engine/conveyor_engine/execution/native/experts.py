"""Mixtures of experts over packed weights: one call sorts tokens by expert, multiplies and adds up."""

import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.packed import pack_into, packed_shape


class PackedExperts:
    """The weights of gated MLPs in the kernels' own layout, one expert after another."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """gate_up: (experts, 2 * size, hidden). down: (experts, hidden, size). The plain tensors are not kept."""
        self.size, self.hidden = down.shape[2], down.shape[1]
        assert gate_up.shape == (len(down), 2 * self.size, self.hidden)
        self._gate_up, self._down = _pack(gate_up), _pack(down)

    def run(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """Return the sum of each token's experts: x (T, hidden), chosen and shares (T, k) -> (T, hidden).

        A number in `chosen` that no expert has adds nothing.
        """
        tokens, per_token = chosen.shape
        assert x.shape == (tokens, self.hidden)
        assert x.dtype == self._down.dtype
        x, chosen, shares = x.contiguous(), chosen.long().contiguous(), shares.float().contiguous()
        y = torch.empty_like(x)
        call = library.Experts(
            *(x.data_ptr(), self._gate_up.data_ptr(), self._down.data_ptr(), chosen.data_ptr(), shares.data_ptr()),
            *(y.data_ptr(), tokens, self.hidden, self.size, len(self._down), per_token),
            *(self._gate_up[0].nbytes, self._down[0].nbytes, library.DTYPES[x.dtype]),
        )
        library.load().cv_run_experts(call)
        return y


def _pack(weights: torch.Tensor) -> torch.Tensor:
    packed = library.zeros((len(weights), *packed_shape(weights[0])), weights.dtype)
    for weight, place in zip(weights, packed, strict=True):
        pack_into(weight, place)
    return packed
