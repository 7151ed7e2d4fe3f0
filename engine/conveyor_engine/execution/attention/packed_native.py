"""Attention over the sequences of one step by the compiled kernels, and who uses them. For models that embed.

Used by `runners.pool`. Keys and values of a layer are written to KV blocks that live as long as the step, in the
layout that `cpu_native` keeps; writing them costs little beside attention, whose work grows with the square.
"""

from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch

from conveyor_engine.config.engine_config import AttentionBackendName
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionSpec
from conveyor_engine.execution.attention.interface import Caches, Paged
from conveyor_engine.execution.attention.packed import Packed, check_spec


class PackedNative:
    """`Paged` for whole sequences that lie one after another. Each has blocks of its own, side by side."""

    runs_bidirectional: ClassVar[bool] = True

    def __init__(self, starts: list[int]) -> None:
        """starts: of each sequence, and where the last one ends."""
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
        self._caches: dict[tuple[int, int, int], Caches] = {}  # by the layer's shape; the next layer writes over them

    def attend(self, spec: AttentionSpec, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        check_spec(spec)
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
        )


def choose_packed(name: AttentionBackendName, device: torch.device, dtype: torch.dtype) -> Callable[[list[int]], Paged]:
    """What makes a step's attention of the starts of its sequences; `torch` is plain torch throughout."""
    can = device.type == "cpu" and native.why_missing() is None and native.supports(dtype)
    return PackedNative if can and name != "torch" else Packed
