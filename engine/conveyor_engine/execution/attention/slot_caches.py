"""KV caches with one row per token slot: what `torch_paged` and `triton_backend` have in common.

A layer's caches are (num_blocks * block_size, Hkv, D) for keys and (..., Dv) for values: a token's head is one
contiguous row, and the block size is free.
"""

from collections.abc import Sequence

import torch

from conveyor_engine.execution.attention.backend import LayerShape


class SlotCaches:
    """The part of an AttentionBackend that owns such caches."""

    def __init__(self) -> None:
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._block_size = 0

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        per_token = sum(layer.num_kv_heads * (layer.head_dim + layer.value_dim) for layer in layers)
        return per_token * block_size * dtype.itemsize

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        for layer in layers:
            shape = (num_blocks * block_size, layer.num_kv_heads)
            keys = torch.zeros((*shape, layer.head_dim), dtype=dtype, device=device)
            self._caches.append((keys, torch.zeros((*shape, layer.value_dim), dtype=dtype, device=device)))

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, for who writes them without `write_kv`."""
        return self._caches[layer]
