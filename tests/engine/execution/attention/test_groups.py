"""Tests which layers share a block table, how many requests then fit, and that layers do not overwrite each other."""

import pytest
import torch

from conveyor_engine.execution.attention.backend import NO_ATTENTION, AttentionMetadata, LayerShape
from conveyor_engine.execution.attention.cpu_native import CpuNative
from conveyor_engine.execution.attention.groups import group_layers, list_parts
from conveyor_engine.execution.attention.torch_paged import TorchPaged
from conveyor_engine.wire.kv_tables import ONE_TABLE, KVTables

BLOCK_SIZE = 16
IN_FLIGHT = 2048


def make_layers(full: LayerShape, windowed: LayerShape, pattern: int, count: int) -> list[LayerShape]:
    """Return layers of which each `pattern`-th one has no window."""
    return [windowed if (index + 1) % pattern else full for index in range(count)]


def heads(kv_heads: int, dim: int, window: int | None = None) -> LayerShape:
    return LayerShape(2 * kv_heads, kv_heads, dim, dim, window=window)


# As published: layers, context, and how many times more requests of the whole context fit.
MODELS = {
    "Gemma 3 1B": (make_layers(heads(1, 256), heads(1, 256, 512), 6, 26), 32_768, 5.9),
    "Gemma 3 12B": (make_layers(heads(8, 256), heads(8, 256, 1024), 6, 48), 32_768, 5.2),
    "Gemma 3 27B": (make_layers(heads(16, 128), heads(16, 128, 1024), 6, 62), 32_768, 5.2),
    "Gemma 4 31B": (make_layers(heads(4, 512), heads(16, 256, 1024), 6, 60), 32_768, 8.4),
    "gpt-oss-20b": (make_layers(heads(8, 64), heads(8, 64, 128), 2, 24), 32_768, 1.99),
    "gpt-oss-20b at 4K": (make_layers(heads(8, 64), heads(8, 64, 128), 2, 24), 4_096, 1.94),
    "Mistral 7B v0.1": ([heads(8, 128, 4096)] * 32, 32_768, 8.0),
}


@pytest.mark.parametrize("name", MODELS)
def test_more_requests_fit_into_the_same_memory(name: str) -> None:
    layers, context, expected = MODELS[name]
    placed, tables = group_layers(layers, context, BLOCK_SIZE, IN_FLIGHT)
    before = TorchPaged().block_bytes(layers, BLOCK_SIZE, torch.bfloat16) * context // BLOCK_SIZE
    after = TorchPaged().block_bytes(placed, BLOCK_SIZE, torch.bfloat16) * tables.count_kept(context, BLOCK_SIZE)
    assert before / after == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("name", MODELS)
def test_each_layer_has_memory_of_its_own_in_a_block(name: str) -> None:
    placed, tables = group_layers(MODELS[name][0], MODELS[name][1], BLOCK_SIZE, IN_FLIGHT)
    spots = [layer.spot for layer in placed]
    assert len(set(spots)) == len(placed)
    assert {spot.table for spot in spots if spot} == set(range(tables.number))
    assert len(list_parts(placed)) == tables.number
    for layer, spot in zip(placed, spots, strict=True):
        assert spot is not None
        assert (spot.table >= tables.full) == (layer.window is not None)
        assert spot.part < spot.parts


@pytest.mark.parametrize(
    "layers",
    [
        [heads(2, 16)] * 4,
        [heads(2, 16, 2000), heads(2, 16)],
        [heads(2, 16), heads(3, 16, 8), heads(2, 16, 8)],
        [heads(2, 15), heads(1, 15, 8)],
        [NO_ATTENTION, heads(2, 16)],
    ],
    ids=["no window", "a window like the context", "windowed layers of two sizes", "odd heads", "states"],
)
def test_all_layers_share_one_table_if_groups_save_nothing_or_are_impossible(layers: list[LayerShape]) -> None:
    assert group_layers(layers, 2048, BLOCK_SIZE, IN_FLIGHT) == (layers, ONE_TABLE)


@pytest.mark.parametrize("backend", [TorchPaged, CpuNative])
@pytest.mark.parametrize("full", [heads(2, 16), heads(1, 16), heads(1, 32)], ids=["alike", "half", "other heads"])
def test_a_block_of_one_table_never_changes_the_keys_of_another(
    backend: type[TorchPaged] | type[CpuNative], full: LayerShape
) -> None:
    layers = make_layers(full, heads(2, 16, 8), 3, 7)
    placed, tables = group_layers(layers, 2048, BLOCK_SIZE, IN_FLIGHT)
    assert tables.windowed
    caches = backend()
    caches.allocate(placed, tables.number, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    step = _one_block_each(tables, list_parts(placed))
    for number, layer in enumerate(placed):
        numbers = torch.full((BLOCK_SIZE, layer.num_kv_heads, layer.head_dim), float(number + 1))
        caches.write_kv(number, numbers, numbers, step)
    for number, layer in enumerate(placed):
        assert layer.spot is not None
        block = step.of_table(layer.spot.table).block_tables[0, 0]
        for cache in caches.caches(number):
            kept = (
                cache
                if isinstance(cache, torch.Tensor)
                else cache.numbers.view(-1, BLOCK_SIZE, *cache.numbers.shape[1:])
            )
            assert (kept[block] == number + 1).all()


def _one_block_each(tables: KVTables, parts: list[int]) -> AttentionMetadata:
    """Return a step of one block, which is block `table` of the pool in each table."""
    steps = [
        AttentionMetadata(
            query_start_loc=torch.tensor([0, BLOCK_SIZE], dtype=torch.int32),
            seq_lens=torch.tensor([BLOCK_SIZE], dtype=torch.int32),
            block_tables=torch.tensor([[table * parts[table]]], dtype=torch.int32),
            slot_mapping=torch.arange(BLOCK_SIZE) + table * parts[table] * BLOCK_SIZE,
            num_seqs=1,
            num_decodes=0,
            num_tokens=BLOCK_SIZE,
            query_start_loc_host=torch.tensor([0, BLOCK_SIZE], dtype=torch.int32).numpy(),
            seq_lens_host=torch.tensor([BLOCK_SIZE], dtype=torch.int32).numpy(),
        )
        for table in range(tables.number)
    ]
    steps[0].others = tuple(steps[1:])
    return steps[0]


def test_a_request_never_needs_more_than_is_planned_for_it() -> None:
    tables = KVTables(full=1, windowed=3, window=100, in_flight=64)
    for num_tokens in range(0, 1000, 7):
        assert tables.count_kept(num_tokens, BLOCK_SIZE) <= tables.count_needed(num_tokens, BLOCK_SIZE)
        longest = tables.find_longest(tables.count_needed(num_tokens, BLOCK_SIZE), BLOCK_SIZE)
        assert longest >= num_tokens
        assert tables.count_needed(longest, BLOCK_SIZE) <= tables.count_needed(num_tokens, BLOCK_SIZE)


def test_the_longest_request_of_a_model_whose_layers_all_have_a_window_is_not_limited_by_its_length() -> None:
    tables = KVTables(full=0, windowed=1, window=100, in_flight=64)
    assert tables.find_longest(10, BLOCK_SIZE) == 160
