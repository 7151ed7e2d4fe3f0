"""The engine's own layers on CUDA: one Triton kernel computes everything between two matrix products.

`recognise` makes these classes, if Triton runs, in place of the classes that they extend. Both compute the same.

For decodes, a layer without norms after attention and MLP takes nine launches: norm, QKV product, heads with cache
writes, attention, output product, residual with norm, gate-up product, activation, down product. For a single row it
takes six launches. There the products are Triton kernels too, which also compute the norm before them and the
activation or the residual after them.
"""

from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.attention.interface import Caches, Paged, attend_stored, residual_of
from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.kernels.one_row import Norm, multiply_row
from conveyor_engine.execution.models.adapters import without_adapters
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, RmsNorm, Rotation


class TritonAttention(Attention):
    """Attention that norms and rotates heads and writes to the cache in one kernel. Its norms, if any, are RmsNorm."""

    def attend(self, hidden_states: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Compute attention, including the output projection: (1, T, hidden) -> (1, T, hidden)."""
        out: torch.Tensor = self.o_proj(self.attend_merged(self.qkv_proj(hidden_states)[0], rotation, paged)[None])
        return out

    def attend_merged(self, qkv: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Compute attention without the output projection -> (T, H * D).

        qkv: (T, all heads * D), with the queries first.
        """
        heads = qkv.view(qkv.shape[0], -1, self.head_dim)

        def store(caches: Caches, slots: torch.Tensor) -> torch.Tensor:
            return prepare_heads(heads, rotation, self._head_norms(), caches, slots)

        return attend_stored(paged, self.spec, self.shape, heads, store).flatten(1)

    def _head_norms(self) -> HeadNorms | None:
        query, key = self.q_norm, self.k_norm
        if not isinstance(query, RmsNorm) or not isinstance(key, RmsNorm):
            return None
        return HeadNorms(query.weight, key.weight, query.eps, query.offset)


class TritonDecoderLayer(DecoderLayer):
    """A decoder layer whose second norm and last product also add the residual. Its `before_mlp` is an RmsNorm."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> torch.Tensor:
        """Compute the layer with the arguments and the result of transformers' decoder layers."""
        if hidden_states.shape[1] == 1 and self._multiplies_rows:
            return self._compute_row(hidden_states[0], position_embeddings, paged)[None]
        attended = self._attend(hidden_states, position_embeddings, paged)
        residual = residual_of(paged, self.self_attn.spec, hidden_states)
        norm = self.before_mlp
        assert isinstance(norm, RmsNorm)
        hidden_states, normed = elementwise.add_rms_norm(residual, attended, norm.weight, norm.eps, norm.offset)
        if self.after_mlp is None:
            return _add_product(hidden_states, self.mlp.down_proj, self.mlp.activate(normed))
        computed: torch.Tensor = self.after_mlp(self.mlp(normed))
        return hidden_states + computed

    @property
    def _multiplies_rows(self) -> bool:
        """Return whether `_compute_row` can compute this layer in this step."""
        attention, mlp = self.self_attn, self.mlp
        linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
        return (
            isinstance(attention, TritonAttention)
            and isinstance(self.before_attention, RmsNorm)
            and self.after_attention is None
            and self.after_mlp is None
            and mlp.activates(elementwise.silu_mul)
            and all(type(without_adapters(linear)) is nn.Linear for linear in linears)
        )

    def _compute_row(self, x: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Compute the layer for a single row: x (1, hidden) -> (1, hidden)."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, TritonAttention)
        qkv = _multiply(attention.qkv_proj, x, norm=_norm(self.before_attention))
        x = _multiply(attention.o_proj, attention.attend_merged(qkv, rotation, paged), residual=x)
        return _multiply(
            mlp.down_proj, _multiply(mlp.gate_up_proj, x, norm=_norm(self.before_mlp), gated=True), residual=x
        )


def _norm(norm: nn.Module) -> Norm:
    assert isinstance(norm, RmsNorm)
    return Norm(norm.weight, norm.eps, norm.offset)


def _multiply(linear: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the result of `multiply_row` for the layer's weight and bias."""
    linear = without_adapters(linear)
    assert isinstance(linear, nn.Linear)
    return multiply_row(x, linear.weight, linear.bias, **options)


def _add_product(residual: torch.Tensor, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return residual + linear(x). Overwrites the residual if the product can add to it."""
    linear = without_adapters(linear)
    if type(linear) is not nn.Linear or linear.bias is not None:
        added: torch.Tensor = residual + linear(x)
        return added
    residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t())
    return residual
