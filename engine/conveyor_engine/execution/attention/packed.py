"""Computes attention for encoders: over whole sequences, packed without padding, with no KV cache between steps.

Used by `runners.packed`, `tasks.transcribe` and `models.packing`. Plain torch, on any device, computes each sequence by
itself, so results do not depend on the rest of the batch. The compiled kernels write a layer's keys and values to
temporary KV blocks, in the layout of `cpu_native`. Writing them costs little compared with attention, whose work grows
with the square of the length.
"""

from itertools import pairwise
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from conveyor_engine.config.engine_config import AttentionBackendName
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.interface import Paged
from conveyor_engine.execution.attention.torch_paged import attend_one
from conveyor_engine.execution.transfer import to_device

Ends = npt.NDArray[np.int32] | None


class MakePaged(Protocol):
    """Makes a step's `Paged` from the starts of its sequences.

    ends: (T,), the number of tokens of its own sequence that each token attends to, from the first on. None: each token
    attends to its whole sequence.
    """

    def __call__(self, starts: list[int], ends: Ends = None) -> Paged: ...


def choose_packed(name: AttentionBackendName, device: torch.device, dtype: torch.dtype) -> MakePaged:
    """Return the function that makes a step's `Paged`. If `name` is `torch`, the `Paged` always uses plain torch."""
    can = device.type == "cpu" and native.why_missing() is None and native.supports(dtype)
    return PackedNative if can and name != "torch" else Packed


class Packed:
    """A `Paged` for whole sequences that are packed one after another, in plain torch."""

    runs_bidirectional: ClassVar[bool] = True

    def __init__(self, starts: list[int], ends: Ends = None) -> None:
        """starts: index of each sequence's first token, and the end of the last sequence. ends: see `MakePaged`."""
        self._starts, self._ends = starts, ends
        # Whether the tokens of a sequence see all of it, so that torch's attention needs no mask.
        self._see_all = [ends is None or int(ends[begin:end].min()) >= end - begin for begin, end in pairwise(starts)]

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        ends = None if self._ends is None else to_device(_cut(self._ends, self._starts, spec), query.device)
        for (begin, end), sees_all in zip(pairwise(self._starts), self._see_all, strict=True):
            one = query[begin:end], key[begin:end], value[begin:end]
            if ends is None or sees_all:
                out[begin:end] = _attend_whole(*one, spec)
            else:
                out[begin:end] = attend_one(*one, spec, ends[begin:end])
        return out


class PackedNative:
    """The same as `Packed`, by the compiled kernels. Each sequence has its own consecutive blocks."""

    runs_bidirectional: ClassVar[bool] = True

    def __init__(self, starts: list[int], ends: Ends = None) -> None:
        """starts: index of each sequence's first token, and the end of the last sequence. ends: see `MakePaged`."""
        self._bounds, self._ends = starts, ends
        lengths = np.diff(starts)
        ends = np.cumsum(-(-lengths // native.BLOCK_SIZE))  # in blocks
        first = np.concatenate(([0], ends[:-1]))
        positions = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        self._num_blocks = int(ends[-1])
        self._slots = torch.from_numpy(np.repeat(first * native.BLOCK_SIZE, lengths) + positions)
        self._starts = torch.tensor(starts, dtype=torch.int32)
        self._lengths = torch.from_numpy(lengths.astype(np.int32))
        tables = first[:, None] + np.arange((ends - first).max())
        self._tables = torch.from_numpy(tables.astype(np.int32))
        # The key is a layer's shape. All layers of one shape use the same caches in turn.
        self._caches: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        shape = (key.shape[1], key.shape[2], value.shape[2])
        caches = self._caches.get(shape)
        if caches is None:
            caches = self._caches[shape] = native.kv_cache(self._num_blocks, *shape, key.dtype)
        native.kv_write(key, value, self._slots, caches)
        return native.paged_attention(
            query,
            caches,
            self._starts,
            self._lengths,
            self._tables,
            value_dim=value.shape[2],
            scaling=spec.scaling,
            causal=spec.causal,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=spec.sinks,
            ends=None if self._ends is None else torch.from_numpy(_cut(self._ends, self._bounds, spec)),
        )


def _cut(ends: npt.NDArray[np.int32], starts: list[int], spec: AttentionSpec) -> npt.NDArray[np.int32]:
    """Return the ends of the keys within a layer's window, which also ends behind each token."""
    if spec.causal or spec.sliding_window:
        positions = np.arange(starts[-1], dtype=np.int32) - np.repeat(starts[:-1], np.diff(starts)).astype(np.int32)
        ends = np.minimum(ends, positions + (1 if spec.causal else spec.sliding_window or 0))
    return ends


def _attend_whole(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Compute attention of one sequence: query (n, H, D), key (n, Hkv, D), value (n, Hkv, Dv) -> (n, H, Dv)."""
    if spec.sliding_window or spec.softcap is not None or spec.sinks is not None:
        return attend_one(query, key, value, spec)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=spec.causal, scale=spec.scaling)
    return out[0].transpose(0, 1)
