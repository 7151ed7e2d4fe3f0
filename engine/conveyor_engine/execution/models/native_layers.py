"""The engine's own decoder layers on a CPU with the compiled kernels, which compute all layers in one call.

The single call needs the KV cache of the compiled kernels (`CpuNative`). With another cache, each layer is two calls,
with attention between them. The last layer is two calls as well in a step that does not sample from every token.

If `find_parts` finds all parts, `recognise` makes a NativeDecoderLayer, a subclass of DecoderLayer that computes the
same. Its linear kernels also add the residuals. `join_layers` then turns a model's list of these layers into one
module.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.interface import Paged, PagedStep, residual_of
from conveyor_engine.execution.models.adapters import Adapters, NativeAdaptedLinear
from conveyor_engine.execution.models.layers import Attention, DecoderLayer, GatedMlp, LayerNorms, RmsNorm, Rotation
from conveyor_engine.execution.models.packed_linear import NativeLinear
from conveyor_engine.execution.models.probe import run_forward
from conveyor_engine.execution.models.trial import Attended, Recorder, same_calls

_TRIED_TOKENS = 8


class NativeDecoderLayer(DecoderLayer):
    """A decoder layer on the compiled kernels. `find_parts` returns its parts."""

    def __init__(self, norms: LayerNorms, attention: Attention, mlp: GatedMlp, parts: native.LayerParts) -> None:
        super().__init__(norms, attention, mlp)
        shape, spec = attention.shape, attention.spec
        self._heads = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        heads = native.Heads(
            *(shape.num_heads, shape.num_kv_heads, shape.head_dim),
            spec.scaling,
            spec.sliding_window,
            spec.softcap,
            spec.sinks,
        )
        self.layer = native.Layer(parts, heads)
        self._of_heads = heads
        self._adapters: Adapters | None = None

    def take_weights(self) -> None:
        """Compute with the weights that the layer's linear layers have now."""
        norms = LayerNorms(self.before_attention, self.before_mlp)
        parts = find_parts(norms, self.self_attn, self.mlp)
        assert parts is not None
        self.layer = native.Layer(parts, self._of_heads)

    def use_adapters(self, adapters: Adapters) -> None:
        """Compute the adapters that the layer's linear layers have got."""
        self._adapters = adapters
        linears = (self.self_attn.qkv_proj, self.self_attn.o_proj, self.mlp.gate_up_proj, self.mlp.down_proj)
        of_linears = [linear.weights if isinstance(linear, NativeAdaptedLinear) else None for linear in linears]
        self.layer.use_adapters(native.LayerAdapters(*of_linears))

    def columns_of(self, num_tokens: int) -> native.Columns | None:
        """Return the columns of adapters that so many tokens of the current step use; None if none uses one."""
        return None if self._adapters is None else self._adapters.columns_of(num_tokens)

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Rotation, paged: Paged, **_: Any
    ) -> torch.Tensor:
        """Compute the layer with the arguments and the result of transformers' decoder layers."""
        spec = self.self_attn.spec
        residual = residual_of(paged, spec, hidden_states)
        columns = self.columns_of(hidden_states.shape[1])
        qkv = self.layer.before_attention(hidden_states, *position_embeddings, columns)
        query, key, value = torch.split(qkv, self._heads, dim=1)
        attended = paged.attend(spec, query, key, value)
        return self.layer.after_attention(residual, attended, self.columns_of(residual.shape[1]))


class NativeLayers(nn.Module):
    """All layers of a model, as one module. They must take the same rotation."""

    def __init__(self, layers: Sequence[NativeDecoderLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._first = layers[:1]  # in a tuple or list, it is no submodule for a second time
        self._indices = [layer.self_attn.spec.layer for layer in layers]
        self._calls = [layer.layer for layer in layers]
        self._cached: tuple[CpuNative, native.Layers] | None = None  # for the backend that ran last

    def forward(self, hidden_states: torch.Tensor, paged: Paged, **others: Any) -> torch.Tensor:
        """Compute all layers with the arguments and the result of one of transformers' decoder layers."""
        done = 0
        if isinstance(paged, PagedStep) and isinstance(paged.backend, CpuNative):
            is_cut = paged.last is not None and paged.last.layer == self._indices[-1]
            if done := len(self._calls) - is_cut:
                step, (cos, sin) = paged.backend.step(paged.metadata), others["position_embeddings"]
                columns = self._first[0].columns_of(hidden_states.shape[1])
                hidden_states = self._with_caches(paged.backend).forward(hidden_states, cos, sin, step, done, columns)
        for layer in self.layers[done:]:
            hidden_states = layer(hidden_states, paged=paged, **others)
        return hidden_states

    def _with_caches(self, backend: CpuNative) -> native.Layers:
        if self._cached is None or self._cached[0] is not backend:
            caches, tables = zip(*((backend.caches(i), backend.table(i)) for i in self._indices), strict=True)
            self._cached = backend, native.Layers(self._calls, caches, tables)
        return self._cached[1]


def join_layers(model: PreTrainedModel) -> None:
    """Replace each list of native layers by one module, if the model passes the same arguments to all of its layers.

    A trial run compares the calls of attention before and after the replacement.
    """
    for parent in list(model.modules()):
        for name, layers in list(parent.named_children()):
            ours = [layer for layer in layers.children() if isinstance(layer, NativeDecoderLayer)]
            if isinstance(layers, nn.ModuleList) and ours and len(ours) == len(layers):
                apart = _observe(model)
                setattr(parent, name, nn.ModuleList([NativeLayers(ours)]))
                if not same_calls(apart, _observe(model)):
                    setattr(parent, name, layers)


def _observe(model: PreTrainedModel) -> list[Attended]:
    """Return the inputs of attention in each layer; an empty list if the model fails."""
    recorder = Recorder(1.0)
    try:
        run_forward(model, torch.arange(_TRIED_TOKENS, device=model.device), recorder)
    except ModelError:
        return []
    return recorder.calls


def find_parts(norms: LayerNorms, attention: Attention, mlp: GatedMlp) -> native.LayerParts | None:
    """Return the parts of a native layer; None if the kernels cannot compute the layer.

    Examples are a layer with norms after attention or MLP, or with an activation other than SiLU.
    """
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
    if mlp.gated is not native.silu_mul or len({(norm.eps, norm.offset) for norm in heads}) > 1:
        return None
    if attention.shape.value_dim != attention.head_dim:
        return None
    qkv, out, gate_up, down = products
    head_norms = (heads[0], heads[1]) if heads else None
    return native.LayerParts(before_attention, qkv, head_norms, out, before_mlp, gate_up, down)
