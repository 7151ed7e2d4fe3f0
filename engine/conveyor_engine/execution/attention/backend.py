"""The protocol of a paged attention backend, and the data that it gets for each step.

`interface` and `tasks.transcribe` call a backend in each layer of a step. `tasks.generate` and `tasks.transcribe` build
the metadata and allocate the KV caches. Only the backend knows the layout of its caches.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.kernels.slot_cache import SlotCache, scale_bytes, slot_bytes


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a layer's keys and values are: in which block table, and where in the memory of its blocks (`groups`).

    A place has memory for `parts` layers of this size, and this layer is number `part` of them. The table holds block
    numbers times `parts`.
    """

    table: int
    place: int
    part: int
    parts: int


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The shape of one layer's attention, as recorded by the probe's forward pass."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values
    window: int | None = None
    spot: Spot | None = None  # None: in table 0, in a place of its own
    values_are_keys: bool = False  # see `AttentionSpec`; a cache then keeps the keys only

    @property
    def kept_dims(self) -> tuple[int, ...]:
        """Return the sizes of what a cache keeps: of keys, and of values if they are not in the keys."""
        return (self.head_dim,) if self.values_are_keys else (self.head_dim, self.value_dim)


NO_ATTENTION = LayerShape(0, 0, 0, 0)  # of a layer that keeps no keys


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The parameters of one layer's attention, the same in every step."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    causal: bool = True  # if false, a token sees later tokens too, with a window as far as back; only `packed` can
    # (H,): one more score for each query head, which takes its share of the softmax and has no value; compared by
    # `same_spec`
    sinks: torch.Tensor | None = field(default=None, compare=False)
    values_are_keys: bool = False  # the values are the first numbers of the keys (`models.latent`)


def same_spec(one: AttentionSpec, other: AttentionSpec) -> bool:
    """Return whether both have the same parameters and the same numbers as sinks."""
    if one.sinks is None or other.sinks is None:
        return one == other and one.sinks is other.sinks
    return one == other and torch.equal(one.sinks, other.sinks)


@dataclass(frozen=True, slots=True)
class Ends:
    """Where the keys end that each token of a step sees, if some tokens see later ones, as those of an image may."""

    of_tokens: torch.Tensor  # int32 (num_tokens,): the end for each token; in a row never descending, and > position
    in_full_layers: bool  # if false, only in layers with a window


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch. Sequences are packed one after another: decodes first, padding last.

    Rows 0 .. num_decodes-1 have exactly one query token, the rows after them one or more. Tokens at index >= num_tokens
    are padding: their slot is -1, nothing is written for them, and their output is never read.

    Query token j of row i has the position p = seq_lens[i] - query_len[i] + j. It sees the keys at positions <= p, or
    those before its end (`Ends`). If the layer has a window, these positions must also be > p - sliding_window.

    A CUDA graph (`graphs.mixed`) has a fixed number of rows: `num_decodes` rows for decodes, and the others for
    prompts. Rows that a step does not use have length 0 and no tokens, and are the last ones of each group. The host
    does not know a step's numbers when the graph is captured. So `num_tokens` is 0 and `seq_lens_host` is empty. In
    `query_start_loc_host`, the last entry minus the entry at num_decodes is only an upper bound on the prompts' tokens.
    Padding tokens of a graph write to a spare block.

    Two rows may share blocks, even blocks that one of them writes in this step (prefix cache). So a backend must write
    the keys and values of the whole batch before any row attends.
    """

    query_start_loc: torch.Tensor  # int32 (num_seqs + 1,), first is 0, last is num_tokens
    seq_lens: torch.Tensor  # int32 (num_seqs,), context including this step's tokens
    block_tables: torch.Tensor  # int32 (num_seqs, max_blocks), row-contiguous; unused entries hold any valid block
    slot_mapping: torch.Tensor  # int64 (num_tokens + padding,), block * block_size + offset
    num_seqs: int
    num_decodes: int
    num_tokens: int  # without padding
    query_start_loc_host: npt.NDArray[np.int32]  # query_start_loc on the host: no backend has to wait for the device
    seq_lens_host: npt.NDArray[np.int32]
    kept: dict[Hashable, object] = field(default_factory=dict)  # results that a backend shares between layers
    # The same step with the block tables and slots of tables 1, 2, ... (`Spot.table`); the other fields are the same.
    others: "tuple[AttentionMetadata, ...]" = ()
    ends: Ends | None = None  # None: no token sees later ones. A decode sees none

    def set_ends(self, ends: Ends | None) -> None:
        """Set `ends`, for all tables."""
        for each in (self, *self.others):
            each.ends = ends

    def ends_of(self, spec: AttentionSpec) -> torch.Tensor | None:
        """Return the ends for each token in this layer; None if no token of it sees later ones."""
        used = self.ends is not None and (self.ends.in_full_layers or spec.sliding_window is not None)
        return self.ends.of_tokens if self.ends is not None and used else None

    def of_table(self, table: int) -> "AttentionMetadata":
        """Return the step with the block tables and slots of this table."""
        return self.others[table - 1] if table else self


@dataclass(slots=True)
class LastLayer:
    """The tokens that get logits. In the last layer, only these attend; keys and values are written for all tokens."""

    layer: int
    tokens: torch.Tensor  # int64 (R,), indices into the packed tokens
    metadata: AttentionMetadata  # each token is a row with one query


Exact = tuple[torch.Tensor, torch.Tensor]  # a step's keys (T, Hkv, D) and values (T, Hkv, Dv), as in `write_kv`


class AttentionBackend(Protocol):
    """Holds the paged KV caches of all layers and computes attention over them."""

    name: str
    widest_latent: int | None  # the most numbers of values that are in their keys; None: any
    is_capturable: bool  # whether a graph can contain it; in a graph, it reads only bounds from the host arrays

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one block in all places together, including the layout's padding."""
        ...

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the caches, filled with zeros. Called once, before the first step."""
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Store this step's keys (T, Hkv, D) and values (T, Hkv, Dv). Strides are free, but the last dimension is
        contiguous."""
        ...

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        """Compute attention of query (T, H, D), any strides, over the caches -> (T, H, Dv), contiguous, same dtype.

        exact: what the caller has written to the caches in this step. If a cache rounds, prompts may read this instead.

        Scores are query . key * spec.scaling, then softcap * tanh(score / softcap) if the spec has a softcap. The
        mask (causal, or by `metadata.ends_of(spec)`, and the window) and the softmax follow. If the spec has sinks, a
        head's sink is one of the scores.
        """
        ...


def spots_of(layers: Sequence[LayerShape]) -> Iterator[tuple[LayerShape, Spot]]:
    """Return each layer with its spot."""
    for number, layer in enumerate(layers):
        yield layer, layer.spot or Spot(0, number, 0, 1)


class SlotCaches:
    """KV caches with one entry for each token slot, (slots, heads, dim). Base class of two backends.

    The numbers of one head of a token are contiguous. Any block size is allowed.
    """

    widest_latent: int | None = None

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        """kv_dtype: the type of the caches; default: the model's."""
        self._kv_dtype = kv_dtype
        self._caches: list[tuple[SlotCache, SlotCache]] = []
        self._num_kept: list[int] = []  # of each layer: 1 if its values are in its keys
        self._tables: list[int] = []  # of each layer
        self._block_size = 0

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        dtype = self._kv_dtype or dtype
        by_memory: dict[Hashable, int] = {}
        for layer, spot in spots_of(layers):
            for which, dim in enumerate(layer.kept_dims):
                scales = spot.parts * scale_bytes(layer.num_kv_heads, dtype)
                by_memory[spot.place, which] = spot.parts * slot_bytes(layer.num_kv_heads, dim, dtype) - scales
                by_memory[spot.place, which, layer.num_kv_heads, spot.parts] = scales
        return block_size * sum(by_memory.values())

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        dtype = self._kv_dtype or dtype
        memory: dict[Hashable, SlotCache] = {}
        for layer, spot in spots_of(layers):
            slots, first = num_blocks * spot.parts * block_size, spot.part * block_size
            both = []
            for which, dim in enumerate(layer.kept_dims):
                key = spot.place, which, layer.num_kv_heads, spot.parts
                if key not in memory:
                    numbers = memory[spot.place, which].numbers if (spot.place, which) in memory else None
                    memory[key] = SlotCache.allocate(slots, layer.num_kv_heads, dim, dtype, device, numbers)
                    memory.setdefault((spot.place, which), memory[key])
                both.append(memory[key].after(first))
            self._caches.append((both[0], both[0].first(layer.value_dim) if layer.values_are_keys else both[1]))
            self._num_kept.append(len(both))
            self._tables.append(spot.table)

    def reads_exact(self, metadata: AttentionMetadata) -> bool:
        """Return whether `attend` reads its argument `exact` in this step."""
        return False

    def caches(self, layer: int) -> tuple[SlotCache, SlotCache]:
        """Return the keys and the values of one layer, for callers that write them without `write_kv`."""
        return self._caches[layer]

    def pair(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[torch.Tensor, SlotCache]]:
        """Yield what `write_kv` writes, each with its cache."""
        return zip((key, value), self._caches[layer][: self._num_kept[layer]], strict=False)

    def of_layer(self, layer: int, metadata: AttentionMetadata) -> AttentionMetadata:
        """Return the step with the block tables and slots of the layer."""
        return metadata.of_table(self._tables[layer])
