"""Tests the number of KV blocks, and the error if too few fit."""

from typing import Any

import pytest

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ConfigError
from conveyor_engine.execution.kv_budget import CACHE_BLOCKS_MAX, CPU_DEFAULT_BYTES, limit_rows, plan_num_blocks

MIB = 2**20


def plan(
    *, free_bytes: int, block_bytes: int = MIB, is_cpu: bool = False, max_num_seqs: int = 32, **config: Any
) -> int:
    return plan_num_blocks(
        EngineConfig(model="m", **config),
        max_num_seqs=max_num_seqs,
        max_model_len=160,
        block_bytes=block_bytes,
        free_bytes=free_bytes,
        is_cpu=is_cpu,
    )


def rows(*, free_bytes: int, row_bytes: int = MIB, is_cpu: bool = False, **config: Any) -> int:
    config = {"max_num_seqs": None} | config
    return limit_rows(
        EngineConfig(model="m", **config),
        max_num_seqs=config["max_num_seqs"] or 32,
        row_bytes=row_bytes,
        free_bytes=free_bytes,
        is_cpu=is_cpu,
    )


def test_states_of_rows_use_half_of_the_cache_s_memory() -> None:
    assert rows(free_bytes=100 * MIB) == 32
    assert rows(free_bytes=40 * MIB) == 17
    assert rows(free_bytes=40 * MIB, kv_memory_fraction=0.5) == 10
    assert rows(free_bytes=10**6 * MIB, row_bytes=200 * MIB, is_cpu=True) == 20


def test_a_configured_number_of_rows_is_never_lowered() -> None:
    with pytest.raises(ConfigError, match=r"a state of 1 MiB for each request.*lower `max_num_seqs` to 17") as caught:
        rows(free_bytes=40 * MIB, max_num_seqs=18)
    assert caught.value.reason == "KVBudgetTooSmall"


@pytest.mark.parametrize("config", [{"max_num_seqs": 18}, {"batching_mode": "none"}, {}])
def test_without_room_for_one_state_no_number_of_rows_is_advised(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="room for 0 beside the KV cache; give the cache more room"):
        rows(free_bytes=40 * MIB, kv_memory_fraction=0.01, **config)


def test_a_given_number_of_blocks_is_taken() -> None:
    assert plan(num_kv_blocks=10, free_bytes=11 * MIB) == 10


def test_one_request_must_fit() -> None:
    with pytest.raises(ConfigError, match=r"needs 10 \(10 MiB\).*set `max_model_len` to 144 or less") as caught:
        plan(num_kv_blocks=9, free_bytes=100 * MIB)
    assert caught.value.reason == "KVBudgetTooSmall"


def test_the_memory_must_be_there_and_some_stays_free() -> None:
    with pytest.raises(ConfigError, match=r"take 20 MiB, but only 20 MiB are free.*95%.*to 19 or less") as caught:
        plan(num_kv_blocks=20, free_bytes=20 * MIB)
    assert caught.value.reason == "KVBudgetTooLarge"
    assert plan(num_kv_blocks=19, free_bytes=20 * MIB) == 19, "the number that it recommends is accepted"


def test_a_fraction_is_of_the_free_memory() -> None:
    assert plan(kv_memory_fraction=0.5, free_bytes=100 * MIB) == 50
    assert plan(free_bytes=100 * MIB) == 85


def test_too_little_free_memory_is_said_with_its_numbers() -> None:
    with pytest.raises(ConfigError, match="the free memory gives 4 KV blocks") as caught:
        plan(free_bytes=5 * MIB)
    assert caught.value.reason == "KVBudgetTooSmall"


def test_without_prefix_caching_no_more_is_taken_than_all_requests_together_fill() -> None:
    for changes in ({}, {"is_cpu": True}, {"kv_memory_fraction": 0.5}):
        assert plan(free_bytes=10**5 * MIB, max_num_seqs=2, prefix_caching=False, **changes) == 20


def test_blocks_that_no_request_fills_are_prefix_cache_within_reason() -> None:
    assert plan(free_bytes=1000 * MIB, max_num_seqs=2) == 850
    assert plan(free_bytes=10**7 * MIB, max_num_seqs=2) == CACHE_BLOCKS_MAX
    assert plan(free_bytes=10**8 * MIB, max_num_seqs=CACHE_BLOCKS_MAX) == 10 * CACHE_BLOCKS_MAX


def test_a_cpu_leaves_memory_to_others_unless_the_amount_is_configured() -> None:
    free = 8 * CPU_DEFAULT_BYTES
    most = CPU_DEFAULT_BYTES // MIB
    assert plan(free_bytes=free, is_cpu=True, max_num_seqs=1024) == most
    assert plan(free_bytes=free, is_cpu=True, max_num_seqs=2) == 20
    assert plan(free_bytes=free, is_cpu=True, max_num_seqs=2, kv_memory_fraction=0.25) == 2 * most
