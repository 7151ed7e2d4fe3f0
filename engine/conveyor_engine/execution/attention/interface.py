"""Connects a layer to paged attention: through `Paged`, or through transformers' attn_implementation "conveyor_paged".

The forward pass carries the data of the step as the keyword argument `paged`. Every supported model passes it on to its
layers, and `models.probe` checks this when the model loads. Our own layers (`models.layers`) call `paged.attend`. The
attention modules of transformers call `paged_attention` once per layer with packed (1, H, T, D) tensors. No mask
function is registered: the mask is None, and the metadata defines causality.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel

from conveyor_engine.errors import ModelError
from conveyor_engine.execution.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Exact,
    LastLayer,
    LayerShape,
    SlotCaches,
)
from conveyor_engine.execution.kernels.slot_cache import SlotCache
from conveyor_engine.execution.states import StateProbe, States

IMPLEMENTATION = "conveyor_paged"
# sdpa comes first: `packed.Packed` uses it too, so results round alike in half precision.
_TRANSFORMERS_OWN = ("sdpa", "eager")
# Keywords that models pass and that have no effect here. Any other keyword that is not None is rejected.
HARMLESS = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_attentions", "cache_position", "deterministic"}
    | {"logits_to_keep"}
)


class Paged(Protocol):
    """The type of the `paged` argument: takes one layer's packed tensors (T, heads, dim) and returns (T, H, Dv)."""

    @property
    def runs_bidirectional(self) -> bool:
        """Return whether layers that are not causal may call it."""
        ...

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class PagedStep:
    """The attention of one step: writes the layer's keys and values, then attends to the cache."""

    backend: AttentionBackend
    metadata: AttentionMetadata
    last: LastLayer | None = None  # set if the last layer attends for fewer tokens than the others
    token_rows: torch.Tensor | None = None  # int64 (T,): the row of each token; None: not known
    states: States | None = None  # of rows, beside the KV cache; None: the model has none
    runs_bidirectional: ClassVar[bool] = False

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.backend.write_kv(spec.layer, key, value, self.metadata)
        return self.attend_written(spec, query, (key, value))

    def attend_written(self, spec: AttentionSpec, query: torch.Tensor, exact: Exact | None) -> torch.Tensor:
        """Do the same as `attend` for a layer that has already written its keys and values."""
        if self.last is None or spec.layer != self.last.layer:
            return self.backend.attend(spec, query, self.metadata, exact)
        return self.backend.attend(spec, query[self.last.tokens], self.last.metadata)


@dataclass(slots=True)
class Probe:
    """Records each layer's shape instead of computing attention. `calls` counts the calls per layer."""

    runs_bidirectional: bool = False
    shapes: dict[int, LayerShape] = field(default_factory=dict)
    calls: dict[int, int] = field(default_factory=dict)
    is_causal: bool = True  # whether every layer is causal
    states: StateProbe = field(default_factory=StateProbe)  # records the states that layers keep for a row

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.calls[spec.layer] = self.calls.get(spec.layer, 0) + 1
        self.is_causal &= spec.causal
        self.shapes[spec.layer] = LayerShape(
            *(query.shape[1], key.shape[1], key.shape[2], value.shape[2]),
            window=spec.sliding_window,
            values_are_keys=spec.values_are_keys,
        )
        return query.new_zeros((*query.shape[:2], value.shape[-1]))


def residual_of(paged: Paged, spec: AttentionSpec, hidden_states: torch.Tensor) -> torch.Tensor:
    """Select, from hidden_states (1, T, hidden), the tokens for which the layer attends."""
    last = paged.last if isinstance(paged, PagedStep) else None
    return hidden_states if last is None or spec.layer != last.layer else hidden_states[:, last.tokens]


Caches = tuple[SlotCache, SlotCache]  # keys, values


def attend_stored(
    paged: Paged,
    spec: AttentionSpec,
    shape: LayerShape,
    like: torch.Tensor,
    store: Callable[[Caches, torch.Tensor, bool], tuple[torch.Tensor, Exact | None]],
) -> torch.Tensor:
    """Do the same as `paged.attend` for a layer that writes its keys and values itself.

    store(caches, slots (T,), keeps) writes them. It returns the queries (T, H, D), and with `keeps` also the keys and
    values. If the step's backend is a SlotCaches, `store` gets the backend's caches. Otherwise it gets temporary caches
    of the type of `like` (T, ...), whose keys and values are then passed to `paged.attend`.
    """
    if isinstance(paged, PagedStep) and isinstance(paged.backend, SlotCaches):
        slots = paged.backend.of_layer(spec.layer, paged.metadata).slot_mapping
        keeps = paged.backend.reads_exact(paged.metadata)
        return paged.attend_written(spec, *store(paged.backend.caches(spec.layer), slots, keeps))
    tokens = like.shape[0]
    keys = like.new_empty((tokens, shape.num_kv_heads, shape.head_dim))
    values = like.new_empty((tokens, shape.num_kv_heads, shape.value_dim))
    query, _ = store((SlotCache(keys), SlotCache(values)), torch.arange(tokens, device=like.device), False)
    return paged.attend(spec, query, keys, values)


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged: Paged | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **unknown: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention: query (1, H, T, D), key (1, Hkv, T, D), value (1, Hkv, T, Dv) -> ((1, T, H, Dv), None).

    Raises ModelError for an argument that would change the result and is not supported.
    """
    if paged is None:
        raise ModelError(f"{type(module).__name__} does not hand keyword arguments through to its attention")
    causal = is_causal is not False and getattr(module, "is_causal", True)
    if attention_mask is not None or not (causal or paged.runs_bidirectional):
        raise ModelError(f"{type(module).__name__} is not plainly causal, and this engine cannot run it for this task")
    for name, value_ in unknown.items():
        if value_ is not None and name not in HARMLESS:
            raise ModelError(
                f"{type(module).__name__} uses {name!r} in its attention, which this engine does not compute"
            )
    layer = module.layer_idx
    assert isinstance(layer, int)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if s_aux is not None and s_aux.shape != (query.shape[1],):  # such as those of all ranks
        raise ModelError(f"{type(module).__name__} has {s_aux.numel()} sinks for {query.shape[1]} heads")
    spec = AttentionSpec(layer, scaling, sliding_window, softcap, causal, s_aux)
    out = paged.attend(spec, *(x[0].transpose(0, 1) for x in (query, key, value)))
    return out.unsqueeze(0), None


def register() -> None:
    """Register the implementation with transformers. Repeated calls are harmless."""
    AttentionInterface.register(IMPLEMENTATION, paged_attention)


def use_transformers_attention(model: PreTrainedModel) -> None:
    """Make the model use transformers' own attention until `set_attn_implementation` chooses ours again."""
    for implementation in _TRANSFORMERS_OWN:
        with contextlib.suppress(ValueError):  # the model does not support it
            model.set_attn_implementation(implementation)
            break
