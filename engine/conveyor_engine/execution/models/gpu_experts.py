"""Experts for GPUs whose weights have 4 or 8 bits in memory. `gpu_packing` makes them from transformers'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from conveyor_engine.execution.kernels.weights import Weights


@dataclass(frozen=True, slots=True)
class Clamps:
    """The activation of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), where both are clamped by `limit`."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class GpuExperts(nn.Module):
    """Experts over packed tokens: hidden states (T, H), and the numbers and shares of each token's experts (T, k)."""

    def __init__(
        self,
        gate_up: Weights,
        down: Weights,
        num_experts: int,
        dtype: torch.dtype,
        biases: Sequence[torch.Tensor] | None = None,
        clamps: Clamps | None = None,
    ) -> None:
        """gate_up, down: the matrices of all experts, one below the other. dtype: of inputs and outputs.

        biases: (all outputs,), or none. clamps: of gpt-oss, whose gate and up are in turns.
        """
        from conveyor_engine.execution.kernels import elementwise, packed_experts  # needs triton

        super().__init__()
        self.gate_up, self.down, self.num_experts, self.dtype = gate_up, down, num_experts, dtype
        self.biases = (None, None) if biases is None else biases
        self._plan, self._multiply = packed_experts.plan_tiles, packed_experts.multiply_experts
        self._activate: Callable[[torch.Tensor], torch.Tensor] = elementwise.silu_mul
        if clamps is not None:
            self._activate = partial(elementwise.clamped_glu, alpha=clamps.alpha, limit=clamps.limit)
        self._many = packed_experts.MANY

    @property
    def kind(self) -> tuple[object, ...]:
        """Return what experts that one trial shows have in common."""
        both = self.gate_up, self.down
        return self.num_experts, *((*each.form, each.numbers.shape, each.group) for each in both)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        if not len(hidden_states):
            return hidden_states
        plan = self._plan(top_k_index, self.num_experts)
        inner = self._activate(self._multiply(hidden_states, self.gate_up, plan, bias=self.biases[0]))
        of_pairs = self._multiply(inner, self.down, plan, top_k_weights, self.biases[1])
        return of_pairs.view(*top_k_index.shape, -1).sum(dim=1)

    def list_variants(self, per_token: int) -> tuple[int, ...]:
        """Return numbers of tokens that reach each variant of the kernels, if each token has so many experts."""
        return 1, self._many * self.num_experts // per_token + 1
