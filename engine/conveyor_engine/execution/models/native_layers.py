"""The engine's own decoder layer on a CPU that has the compiled kernels: one call, where the cache is theirs too.

It is two calls and attention between them where the cache is another's, and in the last layer of a step that does not
sample from every token.

Made by `recognise` where `find_parts` finds all that it needs, in place of the class that it extends; it computes the
same. Residuals are added by the products before them.
"""

from typing import Any

import torch

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.interface import Paged, PagedStep, residual_of
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, GatedMlp, LayerNorms, RmsNorm, Rotation
from conveyor_engine.execution.models.packed_linear import NativeLinear


class NativeDecoderLayer(DecoderLayer):
    """Its parts have been found by `find_parts`."""

    def __init__(self, norms: LayerNorms, attention: Attention, mlp: GatedMlp, parts: native.LayerParts) -> None:
        super().__init__(norms, attention, mlp)
        shape, spec = attention.shape, attention.spec
        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        heads = native.Heads(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim), spec.scaling, spec.sliding_window, spec.softcap
        )
        self._layer = native.Layer(parts, heads)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> torch.Tensor:
        """The call and the result of transformers' decoder layers."""
        spec = self.self_attn.spec
        residual = residual_of(paged, spec, hidden_states)
        if residual is hidden_states and isinstance(paged, PagedStep) and isinstance(paged.backend, CpuNative):
            step, caches = paged.backend.step(paged.metadata), paged.backend.caches(spec.layer)
            return self._layer.forward(hidden_states, *position_embeddings, step, caches)
        qkv = self._layer.before_attention(hidden_states, *position_embeddings)
        query, key, value = torch.split(qkv, self._heads, dim=1)
        return self._layer.after_attention(residual, paged.attend(spec, query, key, value))


def find_parts(norms: LayerNorms, attention: Attention, mlp: GatedMlp) -> native.LayerParts | None:
    """None if the kernels' layer lacks one: it has no norm after attention or MLP, and SiLU alone."""
    linears = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    of_heads = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    found = [
        native.Norm(norm.weight, norm.eps, norm.offset)
        for norm in (norms.before_attention, norms.before_mlp, *of_heads)
        if isinstance(norm, RmsNorm)
    ]
    products = [native.Product(m.packed, m.bias) for m in linears if isinstance(m, NativeLinear)]
    if len(products) < len(linears) or len(found) < 2 + len(of_heads) or norms.after is not None:
        return None
    before_attention, before_mlp, *heads = found
    if not mlp.activates(native.silu_mul) or len({(norm.eps, norm.offset) for norm in heads}) > 1:
        return None
    if attention.shape.value_dim != attention.head_dim:
        return None
    qkv, out, gate_up, down = products
    head_norms = (heads[0], heads[1]) if heads else None
    return native.LayerParts(before_attention, qkv, head_norms, out, before_mlp, gate_up, down)
