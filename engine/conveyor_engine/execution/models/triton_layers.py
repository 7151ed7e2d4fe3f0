"""The engine's own layers on CUDA: whatever is between two matrix products is one Triton kernel.

Made by `recognise` where Triton runs, in place of the classes that these extend; they compute the
same. A decode of a layer without further norms is nine launches: norm; queries, keys and values; heads and cache;
attention; output; residual and norm; gate and up; activation; down.
"""

from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.attention.interface import Caches, Paged, attend_stored, residual_of
from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, RmsNorm, Rotation
from conveyor_engine.execution.models.linear import Linear


class TritonAttention(Attention):
    """Norms of heads, rotation and the write to the cache are one kernel. Its norms, if any, are RmsNorm."""

    def attend(self, hidden_states: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """-> (1, T, hidden)."""
        qkv = self.qkv_proj(hidden_states).view(hidden_states.shape[1], -1, self.head_dim)

        def store(caches: Caches, slots: torch.Tensor) -> torch.Tensor:
            return prepare_heads(qkv, rotation, self._head_norms(), caches, slots)

        attended = attend_stored(paged, self.spec, self.shape, qkv, store)
        out: torch.Tensor = self.o_proj(attended.flatten(1)[None])
        return out

    def _head_norms(self) -> HeadNorms | None:
        query, key = self.q_norm, self.k_norm
        if not isinstance(query, RmsNorm) or not isinstance(key, RmsNorm):
            return None
        return HeadNorms(query.weight, key.weight, query.eps, query.offset)


class TritonDecoderLayer(DecoderLayer):
    """The norm that follows adds the residual in its kernel, and the last product too. `before_mlp` is RmsNorm."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> torch.Tensor:
        """The call of transformers' layers."""
        attended = self._attend(hidden_states, position_embeddings, paged)
        residual = residual_of(paged, self.self_attn.spec, hidden_states)
        norm = self.before_mlp
        assert isinstance(norm, RmsNorm)
        hidden_states, normed = elementwise.add_rms_norm(residual, attended, norm.weight, norm.eps, norm.offset)
        if self.after_mlp is None:
            return _add_product(hidden_states, self.mlp.down_proj, self.mlp.activate(normed))
        computed: torch.Tensor = self.after_mlp(self.mlp(normed))
        return hidden_states + computed


def _add_product(residual: torch.Tensor, linear: Linear, x: torch.Tensor) -> torch.Tensor:
    """residual + linear(x), into the residual if the product can add to it."""
    if type(linear) is not nn.Linear or linear.bias is not None:
        added: torch.Tensor = residual + linear(x)
        return added
    residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t())
    return residual
