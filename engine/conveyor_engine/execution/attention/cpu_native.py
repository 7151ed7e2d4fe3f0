"""Computes paged attention on CPUs with the compiled kernels, which read each key and value once and gather nothing.

`select` chooses this backend if `find_obstacle` returns None. The caches have the layout of `native.kv_cache`: in a
block of 16 tokens, the 16 keys' numbers of one dimension are adjacent, so that one vector holds them.
"""

from collections.abc import Sequence

import torch

from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Exact, LayerShape, spots_of


def find_obstacle(block_size: int, dtype: torch.dtype) -> str | None:
    """Return why the backend cannot use this block size or type on a CPU, as a clause for a message; None if it can."""
    if block_size != native.BLOCK_SIZE:
        return f"its blocks hold {native.BLOCK_SIZE} tokens and block_size is {block_size}"
    if not native.supports(dtype):
        return f"it computes float32 and bfloat16, not {dtype}"
    return native.why_missing()


def _kept_dims(layer: LayerShape) -> tuple[int, int]:
    """Return the sizes of the keys and of the values that `native.kv_cache` keeps."""
    return (0, layer.head_dim) if layer.values_are_keys else (layer.head_dim, layer.value_dim)


class CpuNative:
    """AttentionBackend that uses the compiled kernels."""

    name = "native"
    widest_latent: int | None = None
    is_capturable = True

    def __init__(self) -> None:
        self._caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._value_dims: list[int] = []
        self._tables: list[int] = []

    def block_bytes(self, layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
        by_place = {
            spot.place: spot.parts * native.kv_values_per_block(layer.num_kv_heads, *_kept_dims(layer))
            for layer, spot in spots_of(layers)
        }
        return sum(by_place.values()) * dtype.itemsize

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert device.type == "cpu"
        assert find_obstacle(block_size, dtype) is None
        memory: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer, spot in spots_of(layers):
            sizes = (num_blocks * spot.parts, layer.num_kv_heads, *_kept_dims(layer))
            keys, values = memory[spot.place] = native.kv_cache(*sizes, dtype, memory.get(spot.place))
            self._caches.append((keys[spot.part :], values[spot.part :]))
            self._value_dims.append(layer.value_dim)
            self._tables.append(spot.table)

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and the values of one layer, for callers that write them without `write_kv`."""
        return self._caches[layer]

    def table(self, layer: int) -> int:
        """Return the block table of one layer."""
        return self._tables[layer]

    def step(self, metadata: AttentionMetadata) -> native.CacheStep:
        """Return the step in the form that the kernels need, for callers that compute attention without `attend`."""
        step = metadata.kept.get(native.CacheStep)
        if not isinstance(step, native.CacheStep):
            places = [(each.slot_mapping, each.block_tables) for each in (metadata, *metadata.others)]
            step = native.CacheStep(metadata.query_start_loc, metadata.seq_lens, places)
            metadata.kept[native.CacheStep] = step
        return step

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        native.kv_write(key, value, metadata.of_table(self._tables[layer]).slot_mapping, self._caches[layer])

    def read_latents(self, layer: int, table: torch.Tensor) -> torch.Tensor:
        """Return the keys (T, numbers of a row) in these blocks, of a layer whose values are its keys."""
        return native.kv_read(self._caches[layer][1], table)

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        return native.paged_attention(
            query,
            self._caches[spec.layer],
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.of_table(self._tables[spec.layer]).block_tables,
            value_dim=self._value_dims[spec.layer],
            scaling=spec.scaling,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=spec.sinks,
            ends=metadata.ends_of(spec),
        )
