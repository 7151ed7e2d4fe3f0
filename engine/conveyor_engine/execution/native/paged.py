"""Writes keys and values to a paged KV cache in the kernels' own layout, and attends over it."""

from collections.abc import Sequence

import torch

from conveyor_engine.execution.native import library

BLOCK_SIZE = 16  # tokens in one KV block; the layout depends on this number
_VALUE_ALIGNMENT = 16


def kv_values_per_block(num_kv_heads: int, head_dim: int, value_dim: int) -> int:
    """Return how many numbers one block of one layer's keys and values holds, padding included."""
    return num_kv_heads * BLOCK_SIZE * (head_dim + head_dim % 2 + _padded(value_dim))


def _padded(value_dim: int) -> int:
    return -(-value_dim // _VALUE_ALIGNMENT) * _VALUE_ALIGNMENT


def kv_cache(
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    shared: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeroed caches (keys, values) for one layer. shared: caches whose memory they use, of as many numbers.

    In the cache of keys, each dimension of a block's 16 tokens is contiguous. In the cache of values, all dimensions of
    one token are contiguous. In bfloat16, the dimension that the kernels sum over is stored in pairs: two dimensions of
    a key, or the values of two tokens.

    With head_dim 0, the cache of values has the keys, and the values are their first numbers. value_dim is then the
    keys' size.
    """
    even, width = head_dim + head_dim % 2, _padded(value_dim)
    pair = 1 if dtype == torch.float32 else 2
    of_keys = (num_blocks, num_kv_heads, even // pair, BLOCK_SIZE, pair)
    of_values = (num_blocks, num_kv_heads, BLOCK_SIZE // pair, width, pair)
    if shared is not None:
        return shared[0].view(of_keys), shared[1].view(of_values)
    return library.zeros(of_keys, dtype), library.zeros(of_values, dtype)


def kv_scratch(
    num_blocks: int, num_kv_heads: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return caches as `kv_cache` does, of arbitrary numbers, for one use."""
    each = num_blocks * num_kv_heads * BLOCK_SIZE
    of_keys, of_values = (
        torch.empty(each * size, dtype=dtype) for size in (head_dim + head_dim % 2, _padded(value_dim))
    )
    return kv_cache(num_blocks, num_kv_heads, head_dim, value_dim, dtype, (of_keys, of_values))


def kv_read(values: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Return the rows (T, width) of all tokens in these blocks of a cache of values with one head."""
    return values[blocks, 0].transpose(2, 3).reshape(-1, values.shape[3])


class CacheStep:
    """The places of a step's tokens in the paged caches.

    places: `slots`, as in `kv_write`, and `block_tables`, of each block table. The other tensors are as in
    `paged_attention`.
    """

    def __init__(
        self,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        places: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        assert query_start.dtype == seq_lens.dtype == torch.int32
        assert query_start.is_contiguous()
        assert seq_lens.is_contiguous()
        self._kept = (query_start, seq_lens, places)  # the structures point to their memory
        self.tokens, self.num_tables = places[0][0].shape[0], len(places)
        self.pointer = (library.Step * len(places))()
        for step, (slots, block_tables) in zip(self.pointer, places, strict=True):
            assert (slots.dtype, block_tables.dtype) == (torch.int64, torch.int32)
            assert slots.is_contiguous()
            assert block_tables.shape[1] == 1 or block_tables.stride(1) == 1
            step.slots, step.block_tables = slots.data_ptr(), block_tables.data_ptr()
            step.query_start, step.seq_lens = query_start.data_ptr(), seq_lens.data_ptr()
            step.tokens, step.num_seqs, step.table_stride = self.tokens, seq_lens.shape[0], block_tables.stride(0)


def kv_write(
    key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """Write key (T, Hkv, D) and value (T, Hkv, Dv) to the cache. A cache without keys gets the keys alone.

    slots: int64 (T,), block * 16 + offset of each token; a token with a negative slot is skipped.
    """
    tokens, num_kv_heads, head_dim = key.shape
    assert key.stride(2) == 1 == value.stride(2)
    assert key.dtype == value.dtype == caches[0].dtype
    assert slots.dtype == torch.int64
    assert slots.is_contiguous()
    assert slots.shape == (tokens,)
    call = library.KvWrite(
        *(key.data_ptr(), value.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr(), slots.data_ptr()),
        *(key.stride(1), key.stride(0), value.stride(1), value.stride(0)),
        *(tokens, num_kv_heads, head_dim, value.shape[2], library.DTYPES[key.dtype]),
    )
    library.load().cv_run_kv_write(call)


def paged_attention(
    query: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    query_start: torch.Tensor,
    seq_lens: torch.Tensor,
    block_tables: torch.Tensor,
    *,
    value_dim: int,
    scaling: float,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of query (T, H, D) over caches made by `kv_cache`: (T, H, value_dim).

    query_start (B + 1,), seq_lens (B,) and block_tables (B, W) are int32. Tokens after query_start[-1] are padding, and
    their result is zero. If `causal` is false, each query attends to its whole sequence, or with a window to tokens on
    both sides. sinks: (H,), a score without a value for each query head. ends: int32, where the keys end that each
    token before query_start[-1] sees, in place of `causal`; never descending within a sequence.

    The kernel reads a KV head's keys and values once for each tile of query rows. A row is one query head of one token.
    A tile has at most 48 rows, or more if one token alone has more.
    """
    tokens, num_heads, head_dim = query.shape
    assert query.stride(2) == 1
    assert query.dtype == caches[0].dtype
    assert query_start.dtype == seq_lens.dtype == block_tables.dtype == torch.int32
    assert query_start.is_contiguous()
    assert seq_lens.is_contiguous()
    assert block_tables.shape[1] == 1 or block_tables.stride(1) == 1
    num_seqs = seq_lens.shape[0]
    out = torch.empty((tokens, num_heads, value_dim), dtype=query.dtype)
    out[int(query_start[num_seqs]) :] = 0
    sinks = None if sinks is None else sinks.float().contiguous()
    assert ends is None or (ends.dtype == torch.int32 and ends.is_contiguous())
    call = library.Attention(
        *(query.data_ptr(), out.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr()),
        *(query_start.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr()),
        *(None if each is None else each.data_ptr() for each in (sinks, ends)),
        *(query.stride(1), query.stride(0), block_tables.stride(0)),
        *(num_seqs, num_heads, caches[0].shape[1], head_dim, value_dim),
        *(library.DTYPES[query.dtype], causal, sliding_window or 0, scaling, softcap or 0.0),
    )
    library.load().cv_run_attention(call)
    return out
