"""Computes paged attention on CUDA with the Triton kernels of `kernels`. Chosen by `select`."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Exact, LayerShape, SlotCaches
from conveyor_engine.execution.kernels.decode_plan import DecodePlan, plan_decodes
from conveyor_engine.execution.kernels.kv_store import store
from conveyor_engine.execution.kernels.latent_attention import WIDEST, count_parts, latent_attention
from conveyor_engine.execution.kernels.paged_attention import paged_attention


class TritonPaged(SlotCaches):
    """AttentionBackend that uses the Triton kernels."""

    name = "triton"
    widest_latent: int | None = WIDEST
    is_capturable = True

    def __init__(self, num_processors: int | None = None, kv_dtype: torch.dtype | None = None) -> None:
        """num_processors: multiprocessors to keep busy; default: the device's. kv_dtype: as in `SlotCaches`."""
        super().__init__(kv_dtype)
        self._num_processors = num_processors

    def allocate(
        self, layers: Sequence[LayerShape], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().allocate(layers, num_blocks, block_size, dtype, device)
        if self._num_processors is None:
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        for source, cache in self.pair(layer, key, value):
            store(source, cache, self.of_layer(layer, metadata).slot_mapping)

    def reads_exact(self, metadata: AttentionMetadata) -> bool:
        return self._kv_dtype is not None and metadata.num_decodes < metadata.num_seqs

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        metadata = self.of_layer(spec.layer, metadata)
        exact = exact if self.reads_exact(metadata) else None
        num_tokens, num_heads, _ = query.shape
        out = query.new_empty((num_tokens, num_heads, self._caches[spec.layer][1].numbers.shape[2]))
        if metadata.num_tokens < num_tokens:
            out[metadata.num_tokens :] = 0
        # Decodes use small tiles and prompts large ones: two launches of the same kernel.
        num_decodes, num_seqs = metadata.num_decodes, metadata.num_seqs
        for begin, end, decode in ((0, num_decodes, True), (num_decodes, num_seqs, False)):
            if begin == end:
                continue
            self._kernel(spec, query, metadata, decode, exact)(
                metadata.query_start_loc[begin : end + 1],
                metadata.seq_lens[begin:end],
                metadata.block_tables[begin:end],
                out,
                block_size=self._block_size,
                num_queries=int(metadata.query_start_loc_host[end] - metadata.query_start_loc_host[begin]),
                plan=self._plan(spec, num_heads, metadata) if decode else None,
                scaling=spec.scaling,
            )
        return out

    def _kernel(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, decode: bool, exact: Exact | None
    ) -> Callable[..., None]:
        caches = self._caches[spec.layer]
        if spec.values_are_keys:
            return partial(latent_attention, query, caches[0])
        return partial(
            paged_attention,
            query,
            caches,
            sliding_window=spec.sliding_window,
            softcap=spec.softcap,
            sinks=spec.sinks,
            ends=None if decode else metadata.ends_of(spec),
            exact=None if decode else exact,
        )

    def _plan(self, spec: AttentionSpec, num_heads: int, metadata: AttentionMetadata) -> DecodePlan:
        """Return the plan for this step's decodes. All layers of one shape share it."""
        assert self._num_processors is not None
        _, num_kv_heads, value_dim = self._caches[spec.layer][1].numbers.shape
        if spec.values_are_keys:
            num_kv_heads = count_parts(num_heads)
        shape = (num_heads, num_kv_heads, value_dim, spec.sliding_window)
        plan = metadata.kept.get(shape)
        if plan is None:
            plan = metadata.kept[shape] = plan_decodes(
                metadata.seq_lens[: metadata.num_decodes],
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                value_dim=value_dim,
                sliding_window=spec.sliding_window,
                num_processors=self._num_processors,
            )
        assert isinstance(plan, DecodePlan)
        return plan
