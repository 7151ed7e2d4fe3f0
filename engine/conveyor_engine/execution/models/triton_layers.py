"""The engine's own layers on CUDA: one Triton kernel computes everything between two matrix products.

`recognise` makes these classes, if Triton runs, in place of the classes that they extend. Both compute the same.

For decodes, a layer without norms after attention and MLP takes nine launches: norm, QKV product, heads with cache
writes, attention, output product, residual with norm, gate-up product, activation, down product. For up to four rows it
takes six launches. There the products are Triton kernels too, which also compute the norm before them and the
activation or the residual after them.
"""

from typing import Any

import torch
from torch import nn

from conveyor_engine.execution.attention.backend import Exact
from conveyor_engine.execution.attention.interface import Caches, Paged, attend_stored, residual_of
from conveyor_engine.execution.kernels import elementwise
from conveyor_engine.execution.kernels.few_rows import MOST_ROWS, Norm, multiply_rows
from conveyor_engine.execution.kernels.heads import HeadNorms, prepare_heads
from conveyor_engine.execution.models.adapters import without_adapters
from conveyor_engine.execution.models.gpu_linear import GpuLinear
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

        def store(caches: Caches, slots: torch.Tensor, keeps: bool) -> tuple[torch.Tensor, Exact | None]:
            num_kv_heads = self.shape.num_kv_heads
            keys = heads.new_empty((heads.shape[0], num_kv_heads, self.head_dim)) if keeps else None
            query = prepare_heads(heads, rotation, self._head_norms(), caches, slots, keys)
            return query, None if keys is None else (keys, heads[:, -num_kv_heads:])

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
        residual = residual_of(paged, self.self_attn.spec, hidden_states)
        if residual.shape[1] and hidden_states.shape[1] <= self._most_rows and self._multiplies_rows:
            return self._compute_rows(hidden_states[0], residual[0], position_embeddings, paged)[None]
        attended = self._attend(hidden_states, position_embeddings, paged)
        norm = self.before_mlp
        assert isinstance(norm, RmsNorm)
        hidden_states, normed = elementwise.add_rms_norm(residual, attended, norm.weight, norm.eps, norm.offset)
        if self.after_mlp is None:
            return _add_product(hidden_states, self.mlp.down_proj, self.mlp.activate(normed))
        computed: torch.Tensor = self.after_mlp(self.mlp(normed))
        return hidden_states + computed

    @property
    def _linears(self) -> tuple[nn.Module, ...]:
        return self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj

    @property
    def _most_rows(self) -> int:
        """Return how many rows `_compute_rows` takes. Of weights in few bits, the kernel takes one."""
        return 1 if any(type(without_adapters(linear)) is GpuLinear for linear in self._linears) else MOST_ROWS

    @property
    def _multiplies_rows(self) -> bool:
        """Return whether `_compute_rows` can compute this layer in this step."""
        return (
            isinstance(self.self_attn, TritonAttention)
            and isinstance(self.before_attention, RmsNorm)
            and all(type(without_adapters(linear)) in (nn.Linear, GpuLinear) for linear in self._linears)
        )

    def _compute_rows(self, x: torch.Tensor, residual: torch.Tensor, rotation: Rotation, paged: Paged) -> torch.Tensor:
        """Compute the layer for up to `MOST_ROWS` rows: x (T, hidden), residual (R, hidden) -> (R, hidden)."""
        attention, mlp = self.self_attn, self.mlp
        assert isinstance(attention, TritonAttention)
        qkv = _multiply(attention.qkv_proj, x, norm=_norm(self.before_attention))
        attended = attention.attend_merged(qkv, rotation, paged)
        x = _multiply_and_add(attention.o_proj, attended, residual, self.after_attention)
        gated = mlp.gated is elementwise.silu_mul
        inner = _multiply(mlp.gate_up_proj, x, norm=_norm(self.before_mlp), gated=gated)
        return _multiply_and_add(mlp.down_proj, inner if gated else mlp.gated(inner), x, self.after_mlp)


def _norm(norm: nn.Module) -> Norm:
    assert isinstance(norm, RmsNorm)
    return Norm(norm.weight, norm.eps, norm.offset)


def _multiply(linear: nn.Module, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the result of `multiply_rows` for the layer's weight and bias."""
    linear = without_adapters(linear)
    if isinstance(linear, GpuLinear):
        return linear.multiply_row(x, **options)
    assert isinstance(linear, nn.Linear)
    return multiply_rows(x, linear.weight, linear.bias, **options)


def _multiply_and_add(
    linear: nn.Module, x: torch.Tensor, residual: torch.Tensor, norm: nn.Module | None
) -> torch.Tensor:
    """Return residual + norm(linear(x)), or residual + linear(x) without a norm."""
    if norm is None:
        return _multiply(linear, x, residual=residual)
    added: torch.Tensor = residual + norm(_multiply(linear, x))
    return added


def _add_product(residual: torch.Tensor, linear: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return residual + linear(x). Overwrites the residual if the product can add to it."""
    linear = without_adapters(linear)
    if isinstance(linear, GpuLinear):
        return linear.add_to(residual, x)
    if type(linear) is not nn.Linear or linear.bias is not None:
        added: torch.Tensor = residual + linear(x)
        return added
    residual.flatten(0, -2).addmm_(x.flatten(0, -2), linear.weight.t())
    return residual
