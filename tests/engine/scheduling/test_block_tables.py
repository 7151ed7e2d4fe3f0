"""Tests prefixes that requests share: how they are found, kept apart and forgotten."""

from array import array

import pytest
from tests.engine.builders import make_facts, make_request, make_scheduler, make_state, run_all, run_step

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.kv_tables import KVTables


def test_requests_that_arrive_together_share_their_prefix_in_one_step() -> None:
    scheduler = make_scheduler()
    prompt = list(range(100, 112))
    scheduler.add_request(make_request("a", [*prompt, 1]))
    scheduler.add_request(make_request("b", [*prompt, 3]))
    scheduler.schedule(0.0)
    first, second = scheduler.running
    assert first.block_table[:3] == second.block_table[:3]
    assert scheduler.stats().prefix_cache_hit_tokens == 12


def test_a_prompt_of_nothing_but_cached_blocks_still_computes_its_last_token() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 8, max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 8, max_tokens=1))
    output = run_step(scheduler)["b"]
    assert output.num_cached_tokens == 4
    assert output.new_token_ids == [7]


def test_blocks_computed_before_an_abort_are_found_again() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler)
    scheduler.abort("a")
    scheduler.add_request(make_request("b", 13))
    run_step(scheduler)
    assert scheduler.stats().prefix_cache_hit_tokens == 12


def test_nobody_shares_the_blocks_of_a_request_whose_logits_were_not_finite() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 12))
    run_step(scheduler, token_id=-1)
    scheduler.add_request(make_request("b", 13))
    run_step(scheduler)
    scheduler.blocks.check([r.block_table for r in scheduler.running])
    assert scheduler.stats().prefix_cache_hit_tokens == 0


def test_choices_hash_the_blocks_of_their_prompt_once() -> None:
    scheduler, hashes = make_scheduler(), list[bytes]()
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 9, max_tokens=8, prompt_hashes=hashes))
    first, second = scheduler.requests.values()
    while scheduler.has_unfinished():
        run_step(scheduler)
    assert len(hashes) == 2, "of the prompt's full blocks only"
    assert first.block_hashes[:2] == second.block_hashes[:2] == hashes
    assert all(one is other for one, other in zip(first.block_hashes[:2], second.block_hashes[:2], strict=True))
    assert len(first.block_hashes) > 2


def test_prefix_caching_can_be_switched_off() -> None:
    scheduler = make_scheduler(prefix_caching=False)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 12))
    run_all(scheduler)
    assert (scheduler.stats().prefix_cache_query_tokens, scheduler.stats().prefix_cache_hit_tokens) == (0, 0)


@pytest.mark.parametrize(
    ("first", "second", "num_shared"), [(None, None, 8), ("a", "a", 8), ("a", None, 0), (None, "a", 0), ("a", "b", 0)]
)
def test_prefixes_are_shared_within_one_cache_salt(first: str | None, second: str | None, num_shared: int) -> None:
    scheduler = make_scheduler()
    cached = []
    for request_id, salt in (("one", first), ("two", second)):
        scheduler.add_request(make_request(request_id, 9, cache_salt=salt, max_tokens=1))
        cached.append(run_step(scheduler)[request_id].num_cached_tokens)
    assert cached == [0, num_shared]


def test_no_salt_has_the_hash_of_a_block_as_its_root() -> None:
    """Otherwise a client that knows a block could use it as a salt, and read or forge the blocks after it."""
    block = make_state(list(range(4))).hashes_of_full_blocks(4, 4)[0]
    salt = array("I", range(4)).tobytes().decode()
    assert RequestState(make_request("a", 4, cache_salt=salt), ()).cache_root != block


def test_a_windowed_prompt_with_a_cached_prefix_fits_a_pool_for_one_request() -> None:
    """Its cached blocks are a window already. With room for a second one, it would never be admitted."""
    tables = KVTables(full=0, windowed=1, window=512, in_flight=128)
    facts = make_facts(
        max_model_len=4096, block_size=16, max_num_batched_tokens=64, max_num_seqs=2, kv_tables=tables,
        num_kv_blocks=tables.count_needed(4096, 16),
    )  # fmt: skip
    scheduler = Scheduler(EngineConfig(model="m"), facts)
    for name, length in (("a", 1600), ("b", 3000)):
        scheduler.add_request(make_request(name, [token % 50 for token in range(length)]))
        run_all(scheduler)
    assert not scheduler.requests
    assert scheduler.stats().prefix_cache_hit_tokens > 512
