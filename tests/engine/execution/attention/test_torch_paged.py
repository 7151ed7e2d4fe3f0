"""Compares the plain torch backend with a direct definition of attention, with a dense mask in float64."""

import numpy as np
import pytest
import torch

from conveyor_engine.execution.attention.backend import AttentionMetadata, AttentionSpec, Ends, LayerShape
from conveyor_engine.execution.attention.torch_paged import TorchPaged

BLOCK_SIZE = 4
SCALING = 0.37


def metadata_of(query_lens: list[int], seq_lens: list[int], num_blocks: int) -> AttentionMetadata:
    """Build a batch whose rows have their own shuffled blocks. Rows with one query token come first."""
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    width = -(-max(seq_lens) // BLOCK_SIZE)
    shuffled = np.random.default_rng(0).permutation(num_blocks)[: len(seq_lens) * width]
    tables = shuffled.reshape(len(seq_lens), width).astype(np.int32)
    slots = [
        tables[row, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for row, (n, length) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(length - n, length)
    ]
    lengths = np.array(seq_lens, dtype=np.int32)
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lengths),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        num_seqs=len(seq_lens),
        num_decodes=sum(n == 1 for n in query_lens),
        num_tokens=int(starts[-1]),
        query_start_loc_host=starts,
        seq_lens_host=lengths,
    )


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention: query (n, H, D), the last n tokens, with key (L, Hkv, D), value (L, Hkv, Dv) -> (n, H, Dv).

    ends: (n,), where the keys end that each token sees; None: causal.
    """
    group = query.shape[1] // key.shape[1]
    out = torch.zeros(*query.shape[:2], value.shape[2], dtype=torch.float64)
    for token in range(query.shape[0]):
        position = key.shape[0] - query.shape[0] + token
        first = 0 if window is None else max(0, position - window + 1)
        end = position + 1 if ends is None else int(ends[token])
        for head in range(query.shape[1]):
            seen_keys = key[first:end, head // group].double()
            scores = seen_keys @ query[token, head].double() * SCALING
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            share = 1.0
            if sinks is not None:  # the share of the softmax that the sink leaves
                share = torch.sigmoid(scores.logsumexp(0) - sinks[head].double())
            out[token, head] = share * scores.softmax(0) @ value[first:end, head // group].double()
    return out


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_it_attends_as_written_down(
    heads: tuple[int, int], window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = heads
    sinks = torch.randn(num_heads) if has_sinks else None
    shape = LayerShape(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=8, value_dim=6)
    query_lens, seq_lens = [1, 1, 5, 9, 2], [1, 13, 5, 14, 8]
    backend = TorchPaged()
    backend.allocate([shape, shape], 32, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    keys = [torch.randn(length, num_kv_heads, 8) for length in seq_lens]
    values = [torch.randn(length, num_kv_heads, 6) for length in seq_lens]
    queries = [torch.randn(n, num_heads, 8) for n in query_lens]

    def write(lengths: list[int], last: list[int]) -> AttentionMetadata:
        """Write tokens length - n .. length - 1 of each row."""
        spans = [slice(length - n, length) for n, length in zip(last, lengths, strict=True)]
        metadata = metadata_of(last, lengths, 32)
        packed = [torch.cat([t[s] for t, s in zip(tensors, spans, strict=True)]) for tensors in (keys, values)]
        backend.write_kv(1, packed[0], packed[1], metadata)
        return metadata

    write(seq_lens, seq_lens)  # all tokens at once, then the last ones again, as a step does
    metadata = write(seq_lens, query_lens)
    out = backend.attend(AttentionSpec(1, SCALING, window, softcap, sinks=sinks), torch.cat(queries), metadata)
    expected = [dense_attention(q, k, v, window, softcap, sinks) for q, k, v in zip(queries, keys, values, strict=True)]
    torch.testing.assert_close(out, torch.cat(expected).float(), rtol=1e-5, atol=1e-5)
    assert out.is_contiguous()


@pytest.mark.parametrize("window", [None, 1, 3])
def test_tokens_see_keys_up_to_their_ends_and_no_further_back_than_the_window(window: int | None) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([1, 5, 5, 5, 5, 6, 10, 10, 10, 10, 11], dtype=torch.int32)
    shape = LayerShape(num_heads=4, num_kv_heads=2, head_dim=8, value_dim=6)
    keys, values, queries = torch.randn(11, 2, 8), torch.randn(11, 2, 6), torch.randn(11, 4, 8)
    backend = TorchPaged()
    backend.allocate([shape], 4, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    for begin, end in ((0, 6), (6, 11)):
        metadata = metadata_of([end - begin], [end], 4)
        metadata.set_ends(Ends(ends[begin:end], in_full_layers=True))
        backend.write_kv(0, keys[begin:end], values[begin:end], metadata)
        out = backend.attend(AttentionSpec(0, SCALING, window, None), queries[begin:end], metadata)
        expected = dense_attention(queries[begin:end], keys[:end], values[:end], window, None, None, ends[begin:end])
        torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-5)


def test_padding_tokens_are_neither_written_nor_attended() -> None:
    shape = LayerShape(num_heads=2, num_kv_heads=2, head_dim=8, value_dim=8)
    backend = TorchPaged()
    backend.allocate([shape], 4, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    metadata = metadata_of([3], [3], 4)
    metadata.slot_mapping = torch.cat([metadata.slot_mapping, torch.tensor([-1, -1])])
    backend.write_kv(0, torch.ones(5, 2, 8), torch.ones(5, 2, 8), metadata)
    spec = AttentionSpec(0, scaling=1.0, sliding_window=None, softcap=None)
    assert backend.attend(spec, torch.ones(5, 2, 8), metadata).shape == (5, 2, 8)
    assert int((backend._caches[0][0].numbers != 0).any(-1).any(-1).sum()) == 3


def test_a_block_counts_keys_and_values_of_all_layers() -> None:
    shapes = [LayerShape(4, 2, 8, 8), LayerShape(4, 1, 16, 4)]
    assert TorchPaged().block_bytes(shapes, 16, torch.bfloat16) == 16 * 2 * (2 * (8 + 8) + (16 + 4))
