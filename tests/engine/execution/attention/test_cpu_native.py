"""Compares the compiled attention backend with the one in plain torch, through the engine's protocol."""

import numpy as np
import pytest
import torch

from conveyor_engine.errors import ConfigError
from conveyor_engine.execution import native
from conveyor_engine.execution.attention.backend import (
    AttentionBackend,
    AttentionMetadata,
    AttentionSpec,
    Ends,
    LayerShape,
)
from conveyor_engine.execution.attention.cpu_native import CpuNative, find_obstacle
from conveyor_engine.execution.attention.select import select_backend
from conveyor_engine.execution.attention.torch_paged import TorchPaged

pytestmark = pytest.mark.skipif(
    native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}"
)

CPU = torch.device("cpu")
LAYERS = [LayerShape(4, 2, 16, 16), LayerShape(6, 3, 24, 8)]


IMAGES = ((2, 5), (7, 35), (44, 58))  # places of images whose tokens see each other


def make_metadata(
    lengths: list[tuple[int, int]], padding: int = 0, images: tuple[tuple[int, int], ...] = ()
) -> AttentionMetadata:
    """Build metadata. lengths: (query tokens, context) of each row. Blocks are assigned in a fixed irregular order.

    images: where each row has images. Layers with a window, and others, see them whole.
    """
    queries, totals = (np.array(column, dtype=np.int32) for column in zip(*lengths, strict=True))
    starts = np.concatenate([[0], queries.cumsum()]).astype(np.int32)
    widest = -(-int(totals.max()) // 16)
    tables = (np.random.default_rng(0).permutation(len(lengths) * widest)).reshape(len(lengths), widest)
    positions = np.concatenate([np.arange(t - q, t) for q, t in lengths])
    rows = np.repeat(np.arange(len(lengths)), queries)
    slots = tables[rows, positions // 16] * 16 + positions % 16
    slots = np.concatenate([slots, np.full(padding, -1)])
    ends = positions + 1
    for begin, end in images:
        ends[(begin <= positions) & (positions < end)] = end
    return AttentionMetadata(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(totals),
        block_tables=torch.from_numpy(tables.astype(np.int32)),
        slot_mapping=torch.from_numpy(slots.astype(np.int64)),
        num_seqs=len(lengths),
        num_decodes=sum(q == 1 for q, _ in lengths),
        num_tokens=int(starts[-1]),
        query_start_loc_host=starts,
        seq_lens_host=totals,
        ends=Ends(torch.from_numpy(ends.astype(np.int32)), in_full_layers=True) if images else None,
    )


def run_steps(
    backend: AttentionBackend,
    dtype: torch.dtype,
    window: int | None,
    cap: float | None,
    images: tuple[tuple[int, int], ...] = (),
) -> torch.Tensor:
    """Run a prefill, a chunk and two decodes in two layers. Returns all outputs in one tensor."""
    backend.allocate(LAYERS, 32, 16, dtype, CPU)
    outputs = []
    generator = torch.Generator().manual_seed(0)
    for lengths, padding in (([(5, 5), (40, 40)], 0), ([(1, 6), (20, 60)], 3), ([(1, 7), (1, 61)], 0)):
        metadata = make_metadata(lengths, padding, images)
        for index, layer in enumerate(LAYERS):
            tokens = metadata.num_tokens + padding
            packed = torch.randn((tokens, 100, 24), generator=generator).to(dtype)  # its slices have irregular strides
            query = packed[:, : layer.num_heads, : layer.head_dim]
            key = packed[:, 20 : 20 + layer.num_kv_heads, : layer.head_dim]
            value = packed[:, 50 : 50 + layer.num_kv_heads, : layer.value_dim]
            backend.write_kv(index, key, value, metadata)
            out = backend.attend(AttentionSpec(index, 0.4, window, cap), query, metadata)
            assert out.is_contiguous()
            outputs.append(out[: metadata.num_tokens].flatten().double())
    return torch.cat(outputs)


@pytest.mark.parametrize(("window", "cap"), [(None, None), (9, None), (None, 3.0), (20, 2.0)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_both_backends_agree(dtype: torch.dtype, tolerance: float, window: int | None, cap: float | None) -> None:
    expected = run_steps(TorchPaged(), dtype, window, cap)
    error = (run_steps(CpuNative(), dtype, window, cap) - expected).abs().max()
    assert error < tolerance, f"differ by {error:.1e}"


@pytest.mark.parametrize("window", [None, 9, 20])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)], ids=str)
def test_both_agree_on_images_whose_tokens_see_each_other(
    dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    expected = run_steps(TorchPaged(), dtype, window, None, IMAGES)
    error = (run_steps(CpuNative(), dtype, window, None, IMAGES) - expected).abs().max()
    assert error < tolerance, f"differ by {error:.1e}"
    assert (run_steps(TorchPaged(), dtype, window, None) - expected).abs().max() > 0.1


def test_layers_without_a_window_may_be_causal_beside_layers_that_see_images_whole() -> None:
    metadata = make_metadata([(40, 40)], images=IMAGES)
    assert metadata.ends is not None
    metadata.set_ends(Ends(metadata.ends.of_tokens, in_full_layers=False))
    assert metadata.ends_of(AttentionSpec(0, 1.0, None, None)) is None
    assert metadata.ends_of(AttentionSpec(0, 1.0, 9, None)) is metadata.ends.of_tokens


def test_block_bytes_are_what_the_caches_take() -> None:
    backend = CpuNative()
    backend.allocate(LAYERS, 7, 16, torch.bfloat16, CPU)
    taken = sum(cache.numel() * cache.itemsize for caches in backend._caches for cache in caches)
    assert backend.block_bytes(LAYERS, 16, torch.bfloat16) * 7 == taken


def test_it_is_chosen_on_a_cpu_with_blocks_of_16() -> None:
    assert select_backend("auto", CPU, torch.bfloat16, 16).name == "native"
    assert select_backend("auto", CPU, torch.bfloat16, 32).name == "torch"
    assert select_backend("torch", CPU, torch.bfloat16, 16).name == "torch"


def test_choosing_it_where_it_cannot_run_gives_the_reason() -> None:
    with pytest.raises(ConfigError, match="block_size is 32"):
        select_backend("native", CPU, torch.float32, 32)
    assert "float16" in (find_obstacle(16, torch.float16) or "")
