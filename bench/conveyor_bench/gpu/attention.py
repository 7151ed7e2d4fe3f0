"""Paged attention over random caches, for the stage `kernels`, and torch's own attention on the same numbers."""

from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

from conveyor_bench.gpu.device import Work
from conveyor_bench.gpu.sizes import Sizes
from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, LayerShape
from conveyor_engine.execution.attention.triton_backend import TritonPaged
from conveyor_engine.execution.kernels.slot_cache import SlotCache, slot_bytes

_BLOCK_SIZE = 16
_REHEARSED_PROCESSORS = 16
_COPIES_MAX = 64


class Attention:
    """Rows with the same context length.

    Each row computes its last `num_queries` tokens: one for a decode, all for a prompt.

    There are several copies of the caches, like those of several layers, so that no row finds its keys in the GPU's
    cache. Our kernel reads the blocks of a row in random order. Torch reads the same memory from beginning to end.
    """

    def __init__(
        self,
        sizes: Sizes,
        group: int,
        num_rows: int,
        num_queries: int,
        context: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """kv_dtype: the type of the caches; default: the stage's type."""
        self._device, dtype = torch.device(sizes.device), getattr(torch, sizes.dtype)
        self._num_rows, self._num_queries, self._context = num_rows, num_queries, context
        self._shape = LayerShape(sizes.kv_heads * group, sizes.kv_heads, sizes.head_dim, sizes.head_dim)
        self.kv_bytes = 2 * num_rows * context * slot_bytes(sizes.kv_heads, sizes.head_dim, kv_dtype or dtype)
        self.flops = 4 * num_rows * sum(range(context - num_queries + 1, context + 1)) * self._shape.num_heads
        self.flops *= sizes.head_dim
        self._copies = min(_COPIES_MAX, max(1, -(-sizes.uncached_bytes // self.kv_bytes)))
        self._backend = TritonPaged(None if self._device.type == "cuda" else _REHEARSED_PROCESSORS, kv_dtype)
        self._allocate(dtype)
        self._metadata = self._describe()
        heads = (num_rows * num_queries, self._shape.num_heads, sizes.head_dim)
        self._query = torch.randn(heads, dtype=dtype, device=self._device)

    def _allocate(self, dtype: torch.dtype) -> None:
        num_blocks = self._num_rows * self._blocks_per_row()
        self._backend.allocate([self._shape] * self._copies, num_blocks, _BLOCK_SIZE, dtype, self._device)
        for layer in range(self._copies):
            for cache in self._backend.caches(layer):
                _fill(cache)

    def _blocks_per_row(self) -> int:
        return -(-self._context // _BLOCK_SIZE)

    def _describe(self) -> AttentionMetadata:
        rows, queries, width = self._num_rows, self._num_queries, self._blocks_per_row()
        starts = np.arange(rows + 1, dtype=np.int32) * queries
        seq_lens = np.full(rows, self._context, dtype=np.int32)
        tables = np.random.default_rng(0).permutation(rows * width).reshape(rows, width).astype(np.int32)
        return AttentionMetadata(
            query_start_loc=torch.from_numpy(starts).to(self._device),
            seq_lens=torch.from_numpy(seq_lens).to(self._device),
            block_tables=torch.from_numpy(tables).to(self._device),
            slot_mapping=torch.zeros(rows * queries, dtype=torch.int64, device=self._device),
            num_seqs=rows,
            num_decodes=rows if queries == 1 else 0,
            num_tokens=rows * queries,
            query_start_loc_host=starts,
            seq_lens_host=seq_lens,
        )

    def ours(self) -> list[Work]:
        """Return a call of our kernel for each copy."""
        scaling = self._shape.head_dim**-0.5
        return [self._ours(AttentionSpec(layer, scaling, None, None)) for layer in range(self._copies)]

    def _ours(self, spec: AttentionSpec) -> Callable[[], torch.Tensor]:
        return lambda: self._backend.attend(spec, self._query, self._metadata)

    def sdpa(self) -> list[Work]:
        """Return a call of torch's scaled_dot_product_attention for each copy, in its fastest form."""
        return [self._sdpa(*(c.numbers for c in self._backend.caches(layer))) for layer in range(self._copies)]

    def _sdpa(self, keys: torch.Tensor, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        rows, heads, kv_heads, dim = self._num_rows, self._shape.num_heads, self._shape.num_kv_heads, keys.shape[2]
        k, v = (x.view(rows, -1, kv_heads, dim)[:, : self._context].transpose(1, 2) for x in (keys, values))
        if self._num_queries == 1:  # a group's heads become queries of one head, so that keys are read once for them
            q = self._query.view(rows, kv_heads, heads // kv_heads, dim)
            return lambda: functional.scaled_dot_product_attention(q, k, v)
        q = self._query.view(rows, -1, heads, dim).transpose(1, 2)
        return lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def _fill(cache: SlotCache) -> None:
    """Fill the cache with random numbers. In 8 bits, they are the bit patterns 0 to 99, which e4m3 also has."""
    if cache.scales is None:
        cache.numbers.normal_()
        return
    cache.numbers.view(torch.int8).random_(0, 100)
    cache.scales.uniform_(0.5, 2)
