"""The protocol of a paged attention backend, and the data of a step that it gets.

`interface` calls a backend once per layer and step; `runners.generate` builds the metadata and allocates
the KV caches. Only the backend knows the layout of its caches.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from conveyor_engine.execution.kernels.slot_cache import SlotCache, slot_bytes


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Attention geometry of one layer, as the probe forward saw it."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys
    value_dim: int  # of values; equals head_dim except in latent attention (DeepSeek)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The parameters of one layer's attention, the same in every step."""

    layer: int
    scaling: float
    sliding_window: int | None
    softcap: float | None
    causal: bool = True  # if not, each token sees the whole sequence, which `packed` alone computes


@dataclass(slots=True)
class AttentionMetadata:
    """One step's batch: sequences packed one after another, decodes first, padding last.

    Rows 0 .. num_decodes-1 have exactly one query token, the rows after them any number >= 1. Tokens at
    index >= num_tokens are padding: their slot is -1, nothing is written for them, and their output
    is never read. Query token j of row i has position seq_lens[i] - query_len[i] + j and sees the keys at
    positions <= its own (and > position - sliding_window, where the layer has a window).

    A CUDA graph (`graphs.mixed`) has a fixed number of rows. Those that a step does not use have length 0 and no
    tokens; they follow the decodes, and the other rows. `num_tokens` is then 0, because the host cannot know it when
    the graph is captured, and of the host's arrays only upper bounds are set: the differences between entries 0,
    num_decodes and num_seqs. Padding writes to a spare block.

    Two rows may share blocks, also blocks that one of them writes in this very step (prefix cache).
    So a backend writes the whole batch's keys and values before any row attends.
    """

    query_start_loc: torch.Tensor  # int32 (num_seqs + 1,), first is 0, last is num_tokens
    seq_lens: torch.Tensor  # int32 (num_seqs,), context including this step's tokens
    block_tables: torch.Tensor  # int32 (num_seqs, max_blocks), row-contiguous; unused entries hold any valid block
    slot_mapping: torch.Tensor  # int64 (num_tokens + padding,), block * block_size + offset
    num_seqs: int
    num_decodes: int
    num_tokens: int  # without padding
    query_start_loc_host: npt.NDArray[np.int32]  # the same on the host, so that no backend has to sync
    seq_lens_host: npt.NDArray[np.int32]
    kept: dict[Hashable, object] = field(default_factory=dict)  # what a backend computes once for several layers


@dataclass(slots=True)
class LastLayer:
    """What the last layer attends for: the tokens that get logits. Of the others it needs keys and values alone."""

    layer: int
    tokens: torch.Tensor  # int64 (R,), indices into the packed tokens
    metadata: AttentionMetadata  # each of them a row of one query


class AttentionBackend(Protocol):
    """Paged KV caches of all layers, and attention over them."""

    name: str
    is_capturable: bool  # whether a graph can hold it: of the metadata's host arrays it needs bounds at most

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block in all layers together, padding of the layout included."""
        ...

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Makes the caches, zeroed. Called once, before the first step."""
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        """Stores this step's keys (T, Hkv, D) and values (T, Hkv, Dv); any strides, last dim contiguous."""
        ...

    def attend(self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """Attention of query (T, H, D), any strides, over the caches -> (T, H, Dv) contiguous, same dtype.

        Scores are query . key * spec.scaling, then softcap * tanh(score / softcap) if spec has one,
        then the causal (and window) mask, then softmax.
        """
        ...


class SlotCaches:
    """KV caches with one row per token slot: the part that two backends have in common.

    A token's head is one contiguous row, and the block size is free.
    """

    def __init__(self, kv_dtype: torch.dtype | None = None) -> None:
        """kv_dtype: of the caches; default: the model's."""
        self._kv_dtype = kv_dtype
        self._caches: list[tuple[SlotCache, SlotCache]] = []
        self._block_size = 0

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        dtype = self._kv_dtype or dtype
        return block_size * sum(
            slot_bytes(layer.num_kv_heads, dim, dtype) for layer in layers for dim in (layer.head_dim, layer.value_dim)
        )

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        slots, dtype = num_blocks * block_size, self._kv_dtype or dtype
        for layer in layers:
            keys = SlotCache.allocate(slots, layer.num_kv_heads, layer.head_dim, dtype, device)
            values = SlotCache.allocate(slots, layer.num_kv_heads, layer.value_dim, dtype, device)
            self._caches.append((keys, values))

    def caches(self, layer: int) -> tuple[SlotCache, SlotCache]:
        """Keys and values of one layer, for who writes them without `write_kv`."""
        return self._caches[layer]
