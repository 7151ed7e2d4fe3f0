"""Computes decoder layers with the compiled kernels: several in one call, or one in two calls.

The two calls come before and after the caller's own attention. Structures with the weights and sizes are filled once;
a step only sets the addresses of its tensors.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conveyor_engine.execution.native import library
from conveyor_engine.execution.native.adapters import AdapterWeights, Columns
from conveyor_engine.execution.native.packed import Packed
from conveyor_engine.execution.native.paged import CacheStep

SECONDS = ("linears", "norms", "rope", "activation", "kv_write", "attention")


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm: x / rms(x) * (offset + weight)."""

    weight: torch.Tensor
    eps: float
    offset: float


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer."""

    weight: Packed
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The weights of a layer that computes x + out(attention(qkv(norm(x)))), then the same with a gated MLP."""

    before_attention: Norm
    qkv: Product
    heads: tuple[Norm, Norm] | None  # of query heads and of key heads; eps and offset must be equal
    out: Product
    before_mlp: Norm
    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """The adapters of a layer's products; None for a product that no adapter changes."""

    qkv: AdapterWeights | None = None
    out: AdapterWeights | None = None
    gate_up: AdapterWeights | None = None
    down: AdapterWeights | None = None


@dataclass(frozen=True, slots=True)
class Heads:
    """The parameters of a layer's attention, as in `paged_attention`. Values are as wide as keys."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Layer:
    """The calls for one layer. x is (1, T, hidden), of the weights' type. Only one thread at a time may use it."""

    def __init__(self, parts: LayerParts, of: Heads) -> None:
        self._sinks = None if of.sinks is None else of.sinks.float().contiguous()
        self._parts = parts  # kept alive, because the structures point to its memory
        self._type = parts.before_attention.weight.dtype
        self._dtype = library.DTYPES[self._type]
        self._heads = (of.num_heads + 2 * of.num_kv_heads, of.head_dim)
        query, key = parts.heads or (None, None)
        heads = library.Heads(
            q_weight=query and query.weight.data_ptr(), k_weight=key and key.weight.data_ptr(),
            heads=of.num_heads, kv_heads=of.num_kv_heads, head_dim=of.head_dim, dtype=self._dtype,
            eps=query.eps if query else 0.0, offset=query.offset if query else 0.0,
        )  # fmt: skip
        size = parts.down.weight.in_features
        self.call = library.Layer(
            before=library.BeforeAttention(self._norm(parts.before_attention), self._product(parts.qkv), heads),
            write=self._write(of),
            attention=self._attention(of),
            after=library.AfterAttention(
                self._product(parts.out),
                self._norm(parts.before_mlp),
                self._product(parts.gate_up),
                library.SiluMul(size=size, x_stride=2 * size, dtype=self._dtype),
                self._product(parts.down),
            ),
        )
        self._before, self._after = self.call.before, self.call.after
        self._adapters = LayerAdapters()
        self._library = library.load()

    def use_adapters(self, adapters: LayerAdapters) -> None:
        """Compute these adapters too, in steps with columns."""
        self._adapters = adapters  # kept alive
        for name in ("out", "gate_up", "down"):
            setattr(self._after, f"{name}_adapters", _pointer(getattr(adapters, name)))
        self._before.qkv_adapters = _pointer(adapters.qkv)

    def _write(self, of: Heads) -> library.KvWrite:
        return library.KvWrite(
            num_kv_heads=of.num_kv_heads, head_dim=of.head_dim, value_dim=of.head_dim, dtype=self._dtype
        )

    def _attention(self, of: Heads) -> library.Attention:
        return library.Attention(
            num_heads=of.num_heads, num_kv_heads=of.num_kv_heads, head_dim=of.head_dim, value_dim=of.head_dim,
            dtype=self._dtype, causal=True, window=of.sliding_window or 0, scale=of.scaling, softcap=of.softcap or 0.0,
            sinks=None if self._sinks is None else self._sinks.data_ptr(),
        )  # fmt: skip

    def _norm(self, norm: Norm) -> library.RmsNorm:
        size = norm.weight.shape[0]
        return library.RmsNorm(
            weight=norm.weight.data_ptr(), inner=1, size=size, outer_stride=size, dtype=self._dtype,
            eps=norm.eps, offset=norm.offset,
        )  # fmt: skip

    def _product(self, product: Product) -> library.Linear:
        return product.weight.product(
            self._type, bias=None if product.bias is None else product.bias.data_ptr(),
            x_stride=product.weight.in_features, y_stride=product.weight.out_features,
        )  # fmt: skip

    def before_attention(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, columns: Columns | None = None
    ) -> torch.Tensor:
        """Compute queries, keys and values (T, H + 2 Hkv, D). Queries and keys are rotated by cos, sin (1, T, R).

        If the layer has norms for heads, queries and keys are normed before the rotation. columns: of the tokens'
        adapters; None: no token has one.
        """
        tokens, call = x.shape[1], self._before
        assert x.is_contiguous()
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert cos.shape == sin.shape == (1, tokens, cos.shape[2])
        assert x.dtype == cos.dtype == sin.dtype
        normed, qkv = torch.empty_like(x), x.new_empty((tokens, *self._heads))
        norm, product, heads = call.norm, call.qkv, call.heads
        norm.outer = product.rows = heads.tokens = tokens
        norm.x = x.data_ptr()
        norm.y = product.x = normed.data_ptr()
        product.y = heads.qkv = qkv.data_ptr()
        heads.cos, heads.sin, heads.rotary = cos.data_ptr(), sin.data_ptr(), cos.shape[2]
        assert columns is None or columns.num_tokens == tokens
        call.columns = _pointer(columns)
        self._library.cv_run_before_attention(call)
        return qkv

    def after_attention(self, x: torch.Tensor, attended: torch.Tensor, columns: Columns | None = None) -> torch.Tensor:
        """Compute the layer's output (1, T, hidden) from its input x and attention's output (T, H, D)."""
        tokens, call = x.shape[1], self._after
        assert attended.is_contiguous()
        assert attended.dtype == x.dtype
        y, normed = torch.empty_like(x), torch.empty_like(x)
        gate_up = x.new_empty((tokens, call.gate_up.n))
        activated = x.new_empty((tokens, call.activation.size))
        out, norm, product, activation, down = call.out, call.norm, call.gate_up, call.activation, call.down
        out.rows = norm.outer = product.rows = activation.rows = down.rows = tokens
        out.x, out.residual = attended.data_ptr(), x.data_ptr()
        out.y = norm.x = down.residual = down.y = y.data_ptr()
        norm.y = product.x = normed.data_ptr()
        product.y = activation.x = gate_up.data_ptr()
        activation.y = down.x = activated.data_ptr()
        assert columns is None or columns.num_tokens == tokens
        call.columns = _pointer(columns)
        self._library.cv_run_after_attention(call)
        return y


def _pointer(of: AdapterWeights | Columns | None) -> Any:
    return None if of is None else ctypes.pointer(of.call)


class Layers:
    """Computes layers one after another, each with its KV cache, in one call. Only one thread at a time may use it."""

    def __init__(
        self, layers: Sequence[Layer], caches: Sequence[tuple[torch.Tensor, torch.Tensor]], tables: Sequence[int]
    ) -> None:
        """tables: the block table of each layer."""
        self._kept = (layers, caches)  # kept alive, because the structures point to their memory
        self._num_tables = max(tables) + 1
        for layer, (keys, values), table in zip(layers, caches, tables, strict=True):
            layer.call.table = table
            layer.call.write.k_cache = layer.call.attention.k_cache = keys.data_ptr()
            layer.call.write.v_cache = layer.call.attention.v_cache = values.data_ptr()
        pointers = [ctypes.pointer(layer.call) for layer in layers]
        self._call = library.Layers(layers=(ctypes.POINTER(library.Layer) * len(layers))(*pointers))
        self._library = library.load()

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: CacheStep,
        count: int,
        columns: Columns | None = None,
    ) -> torch.Tensor:
        """Compute the output (1, T, hidden) of the first `count` layers, with cos, sin (1, T, R).

        Writes the layers' keys and values to their caches. columns: of the tokens' adapters; None: no token has one.
        """
        layers, caches = self._kept
        assert 0 < count <= len(layers)
        assert x.is_contiguous()
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        assert cos.shape == sin.shape == (1, step.tokens, cos.shape[2])
        assert x.shape[1] == step.tokens
        assert self._num_tables <= step.num_tables
        assert columns is None or columns.num_tokens == step.tokens
        assert x.dtype == cos.dtype == sin.dtype == caches[0][0].dtype
        y, call = torch.empty_like(x), self._call
        call.x, call.y, call.cos, call.sin = x.data_ptr(), y.data_ptr(), cos.data_ptr(), sin.data_ptr()
        call.steps, call.count, call.rotary = step.pointer, count, cos.shape[2]
        call.columns = _pointer(columns)
        self._library.cv_run_layers(call)
        return y


def take_layer_seconds() -> dict[str, float]:
    """Return the seconds that all layers spent in each part since the last call. The keys are those in SECONDS."""
    seconds = (ctypes.c_double * len(SECONDS))()
    library.load().cv_take_layer_seconds(seconds)
    return dict(zip(SECONDS, seconds, strict=True))
