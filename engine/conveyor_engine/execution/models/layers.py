"""The engine's own decoder layer and its parts, which replace transformers' modules that compute the same.

`recognise` builds them from a model's modules and `fuse` replaces those modules, so each part is called in the same way
as the module that it replaces. Hidden states are (1, T, hidden): the packed sequences of a step. Nothing here depends
on a model family.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.attention.backend import AttentionSpec, LayerShape
from conveyor_engine.execution.attention.interface import Paged, residual_of
from conveyor_engine.execution.models.elementwise import choose_elementwise
from conveyor_engine.execution.models.linear import Linear

Rotation = tuple[torch.Tensor, torch.Tensor]  # cos, sin: each (1, T, R), R <= head_dim


class RmsNorm(nn.Module):
    """Computes x / rms(x) * (offset + weight)."""

    def __init__(self, weight: torch.Tensor, eps: float, offset: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.offset = eps, offset
        self._rms_norm = choose_elementwise(weight.device, weight.dtype).rms_norm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self._rms_norm(hidden_states, self.weight, self.eps, self.offset)


class GatedMlp(nn.Module):
    """Computes down(gated(gate_up(x))), with gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, gated: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """gated: the activation, (..., 2 * size) -> (..., size). Its input has the gate first."""
        super().__init__()
        self.gate_up_proj, self.down_proj = gate_up, down
        self.gated = gated

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.activate(hidden_states))
        return out

    def activate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute the input of the last product: (1, T, size)."""
        return self.gated(self.gate_up_proj(hidden_states))


class Attention(nn.Module):
    """Causal attention over the paged cache, with queries, keys and values from one product."""

    def __init__(
        self,
        spec: AttentionSpec,
        shape: LayerShape,
        projections: tuple[Linear, Linear],
        norms: tuple[nn.Module, nn.Module] | None,
        rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        """projections: one for queries, keys and values side by side, and the output projection.

        norms: of each query head and of each key head; None: the model has none.
        """
        super().__init__()
        self.spec, self.shape, self.head_dim = spec, shape, shape.head_dim
        self.qkv_proj, self.o_proj = projections
        self.q_norm: nn.Module | None
        self.k_norm: nn.Module | None
        self.q_norm, self.k_norm = norms or (None, None)
        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self._rope = rope

    def attend(self, hidden_states: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Compute attention, including the output projection: (1, T, hidden) -> (1, T, hidden)."""
        qkv = self.qkv_proj(hidden_states).view(hidden_states.shape[1], -1, self.head_dim)
        query, key, value = qkv.split(self._heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        attended = paged.attend(self.spec, self._rope(query, *rotation), self._rope(key, *rotation), value)
        out: torch.Tensor = self.o_proj(attended.flatten(1)[None])
        return out

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> tuple[torch.Tensor, None]:
        """Compute attention with the arguments and the result of transformers' attention modules."""
        return self.attend(hidden_states, position_embeddings, paged), None


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """A layer's norms: before attention and MLP, and in some models also after them."""

    before_attention: nn.Module
    before_mlp: nn.Module
    after: tuple[nn.Module, nn.Module] | None = None  # of attention's output, of the MLP's output


class DecoderLayer(nn.Module):
    """Computes x + after(attention(norm(x))), then the same with the MLP. `after` is a norm that some models have."""

    def __init__(self, norms: LayerNorms, attention: Attention, mlp: GatedMlp) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.before_attention, self.before_mlp = norms.before_attention, norms.before_mlp
        self.after_attention: nn.Module | None
        self.after_mlp: nn.Module | None
        self.after_attention, self.after_mlp = norms.after or (None, None)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> torch.Tensor:
        """Compute the layer with the arguments and the result of transformers' decoder layers."""
        residual = residual_of(paged, self.self_attn.spec, hidden_states)
        hidden_states = residual + self._attend(hidden_states, position_embeddings, paged)
        computed: torch.Tensor = self.mlp(self.before_mlp(hidden_states))
        if self.after_mlp is not None:
            computed = self.after_mlp(computed)
        return hidden_states + computed

    def _attend(self, hidden_states: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Return what attention, with its norms, adds to the residual."""
        attended: torch.Tensor = self.self_attn.attend(self.before_attention(hidden_states), rotation, paged)
        return attended if self.after_attention is None else self.after_attention(attended)
