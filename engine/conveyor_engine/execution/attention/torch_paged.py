"""Computes paged attention in plain torch, on any device. It is the reference and the fallback.

Devices without a backend of their own use it, and the tests compare the other backends with it. It attends sequence by
sequence, over gathered keys and values. The query heads of a group become rows of one product, so a decode reads K
and V once.
"""

import torch
from torch.nn import functional

from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Exact, SlotCaches


class TorchPaged(SlotCaches):
    """AttentionBackend that uses plain tensors."""

    name = "torch"
    is_capturable = False

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, metadata: AttentionMetadata) -> None:
        slots = self.of_layer(layer, metadata).slot_mapping[: metadata.num_tokens]
        for source, cache in self.pair(layer, key, value):
            cache.numbers.index_copy_(0, slots, source[: metadata.num_tokens])

    def attend(
        self, spec: AttentionSpec, query: torch.Tensor, metadata: AttentionMetadata, exact: Exact | None = None
    ) -> torch.Tensor:
        keys, values = (cache.numbers for cache in self._caches[spec.layer])
        metadata = self.of_layer(spec.layer, metadata)
        out = query.new_zeros((query.shape[0], query.shape[1], values.shape[2]))
        starts = metadata.query_start_loc_host.tolist()
        seq_lens = metadata.seq_lens_host.tolist()
        offsets = torch.arange(self._block_size, device=query.device)
        ends = metadata.ends_of(spec)
        for row in range(metadata.num_seqs):
            begin, end, seq_len = starts[row], starts[row + 1], seq_lens[row]
            num_blocks = -(-seq_len // self._block_size)
            blocks = metadata.block_tables[row, :num_blocks].long()
            slots = (blocks[:, None] * self._block_size + offsets).view(-1)[:seq_len]
            # No query sees a key before the first query's window.
            first = max(0, seq_len - (end - begin) + 1 - spec.sliding_window) if spec.sliding_window else 0
            slots = slots[first:]
            seen = None if ends is None else ends[begin:end] - first
            out[begin:end] = attend_one(query[begin:end], keys[slots], values[slots], spec, seen)
        return out


def attend_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, spec: AttentionSpec, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute attention of one sequence -> (n, H, Dv).

    query: (n, H, D), the last n of L positions. key: (L, Hkv, D). value: (L, Hkv, Dv). ends: (n,), where the keys end
    that each query sees; None: as the spec says.
    """
    num_queries, num_heads, head_dim = query.shape
    num_keys, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    # (Hkv, group * n, D): the queries of all heads in a group, side by side, because they read the same KV head
    grouped = query.view(num_queries, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(num_kv_heads, group * num_queries, head_dim).contiguous()  # on CUDA, rows must be aligned
    key, value = key.transpose(0, 1), value.transpose(0, 1)
    mask = _mask(num_queries, num_keys, spec, ends, query.device)
    mask = None if mask is None else mask.repeat(group, 1)
    if spec.softcap is None and spec.sinks is None:
        out = functional.scaled_dot_product_attention(
            grouped[None], key[None], value[None], attn_mask=mask, scale=spec.scaling
        )[0]
    else:
        scores = torch.matmul(grouped, key.transpose(1, 2)).float() * spec.scaling
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if spec.sinks is not None:
            sinks = spec.sinks.float().view(num_kv_heads, group, 1).repeat_interleave(num_queries, 1)
            scores = torch.cat([scores, sinks], -1)
        out = torch.matmul(scores.softmax(-1)[..., :num_keys].to(value.dtype), value)
    out = out.view(num_kv_heads, group, num_queries, -1).permute(2, 0, 1, 3)
    return out.reshape(num_queries, num_heads, -1)


def _mask(
    num_queries: int, num_keys: int, spec: AttentionSpec, ends: torch.Tensor | None, device: torch.device
) -> torch.Tensor | None:
    """Return which keys each query sees, bool (n, L); None if all queries see all keys.

    For a single query, the caller has already removed the keys outside the window.
    """
    if num_queries == 1 or not (spec.causal or spec.sliding_window or ends is not None):
        return None
    position = torch.arange(num_keys - num_queries, num_keys, device=device)[:, None]
    key_position = torch.arange(num_keys, device=device)[None, :]
    end = position + 1 if spec.causal else position + (spec.sliding_window or 0)
    mask = key_position < (end if ends is None else ends[:, None])
    if spec.sliding_window:
        mask &= key_position > position - spec.sliding_window
    return mask
