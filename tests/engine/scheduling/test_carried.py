"""Tests how many requests the KV cache carries.

It is known after a shortage, and forgotten when there is room again.
"""

import pytest
from tests.engine.builders import make_request, make_scheduler, run_all

from conveyor_engine.scheduling.counters import Carried
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_protocol.workload import Lengths


def note(carried: Carried, begin: float, seconds: int, *, running: int, usage: float, short: bool = False) -> None:
    for second in range(seconds):
        carried.observe(begin + second, running, usage, short)


def test_a_cache_that_was_never_short_says_nothing() -> None:
    carried = Carried(32)
    note(carried, 0, 600, running=31, usage=1.0)
    assert carried.number is None


def test_what_ran_while_blocks_were_short_is_carried_and_stays_known_when_fewer_run() -> None:
    carried = Carried(32)
    note(carried, 0, 30, running=8, usage=1.0, short=True)
    assert carried.number == 8
    note(carried, 30, 3600, running=6, usage=0.75)
    assert carried.number == 8
    carried.observe(90_000, 1, 0.01, False)  # after a night without requests
    assert carried.number == 8


def test_one_request_that_did_not_fit_is_not_the_whole_truth() -> None:
    carried = Carried(32)
    note(carried, 0, 300, running=10, usage=0.5)
    carried.observe(300, 3, 0.9, True)
    assert carried.number == 20


def test_longer_requests_are_carried_in_smaller_numbers_within_minutes() -> None:
    carried = Carried(32)
    note(carried, 0, 60, running=16, usage=1.0, short=True)
    note(carried, 60, 180, running=4, usage=1.0, short=True)
    assert carried.number == 5


def test_shorter_requests_that_would_fit_in_larger_numbers_are_believed() -> None:
    carried = Carried(32)
    note(carried, 0, 60, running=8, usage=1.0, short=True)
    note(carried, 60, 180, running=6, usage=0.3)
    assert carried.number is not None
    assert 12 < carried.number <= 20
    note(carried, 240, 120, running=6, usage=0.1)
    assert carried.number is None


def test_the_estimate_holds_until_the_cache_shows_otherwise() -> None:
    carried = Carried(32, 10)
    assert carried.number == 10
    note(carried, 0, 60, running=4, usage=0.4)
    assert carried.number == 10
    note(carried, 60, 300, running=5, usage=1.0, short=True)
    assert carried.number == 5
    roomy = Carried(32, 10)
    note(roomy, 0, 600, running=4, usage=0.1)
    assert roomy.number is None


def test_observed_lengths_give_the_number_before_the_cache_runs_out() -> None:
    carried = Carried(32, num_blocks=100)
    for _ in range(99):
        carried.learn(10)
    assert carried.number is None
    carried.learn(10)
    assert carried.number == 10
    for _ in range(500):
        carried.learn(2)
    assert carried.number is None, "a whole batch fits"
    for _ in range(500):
        carried.learn(10)
    note(carried, 0, 30, running=6, usage=1.0, short=True)
    carried.learn(1)
    assert carried.number == 6, "what was measured counts"


def crowd(scheduler: Scheduler, requests: int) -> None:
    for number in range(requests):
        scheduler.add_request(make_request(str(number), [number] * 16, max_tokens=8))


def test_a_scheduler_that_lacks_blocks_says_how_many_ran() -> None:
    scheduler = make_scheduler(num_kv_blocks=16, max_num_seqs=8, max_num_batched_tokens=256)
    crowd(scheduler, 6)
    assert scheduler.schedule(0.0) is not None
    assert (len(scheduler.running), scheduler.stats().num_carried) == (4, 4)


def test_a_closed_batch_that_lacks_blocks_does_so_too() -> None:
    scheduler = make_scheduler("dynamic", num_kv_blocks=18, max_num_seqs=8, max_num_batched_tokens=256)
    crowd(scheduler, 8)
    assert scheduler.schedule(1.0) is not None
    assert scheduler.stats().num_carried == len(scheduler.running) == 3


@pytest.mark.parametrize(("declared", "number"), [(False, 8), (True, None)], ids=["observed", "declared"])
def test_a_scheduler_learns_from_requests_that_end(declared: bool, number: int | None) -> None:
    """Each holds two of the sixteen blocks by itself. The third block is that of a prompt which all have in common."""
    lengths = {"workload_input_tokens": Lengths(16, 16), "workload_output_tokens": Lengths(8, 8)} if declared else {}
    scheduler = make_scheduler(num_kv_blocks=16, block_size=16, max_num_seqs=32, max_num_batched_tokens=256, **lengths)
    for index in range(120):
        prompt = [*[7] * 16, *[index] * 16, index]
        scheduler.add_request(make_request(str(index), prompt, max_tokens=8))
        run_all(scheduler)
    assert scheduler.stats().num_carried == number


def test_a_scheduler_that_lacks_places_only_says_nothing() -> None:
    scheduler = make_scheduler(num_kv_blocks=256, max_num_seqs=2)
    crowd(scheduler, 6)
    run_all(scheduler)
    assert scheduler.stats().num_carried is None
