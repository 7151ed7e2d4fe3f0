"""Tests the scheduler's counters."""

from tests.engine.builders import make_request, make_scheduler, run_all


def test_counters_agree_with_requests_and_answers() -> None:
    scheduler = make_scheduler(num_kv_blocks=8, max_model_len=24)
    for number in range(5):
        scheduler.add_request(make_request(str(number), [number * 50 + i for i in range(8)], max_tokens=16))
    scheduler.add_request(make_request("gone"))
    scheduler.abort("gone")
    run_all(scheduler)
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (5 * 8, 5 * 16)
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert stats.num_preemptions > 0


def test_paged_blocks_waste_less_than_four_percent_at_contexts_of_hundreds_of_tokens() -> None:
    """This is the bar of PagedAttention (Kwon et al., SOSP'23). A reserved cache wastes 60 to 80 percent there."""

    def waste(mode: str) -> float:
        scheduler = make_scheduler(
            mode, block_size=16, num_kv_blocks=512, max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=1024
        )
        for number in range(24):
            scheduler.add_request(
                make_request(str(number), [number] * (200 + 7 * number), max_tokens=40 + 31 * number % 200)
            )
        run_all(scheduler, now=100.0)
        stats = scheduler.stats()
        return 1 - stats.kv_live_token_steps / stats.kv_allocated_token_steps

    assert 0 < waste("continuous") < 0.04 < waste("dynamic") < waste("static")
