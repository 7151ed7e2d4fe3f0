"""Tests the guarantees of levels under ten times the engine's capacity, in virtual time. A step takes a second."""

from itertools import count, islice
from statistics import quantiles

import pytest
from tests.engine.builders import make_request, make_scheduler, run_all, run_step

from conveyor_engine.wire.request import FinishReason
from conveyor_protocol.request_headers import LEVEL_AGEING_SECONDS

ROWS = 8
MODES = ["none", "static", "dynamic", "continuous"]


@pytest.mark.parametrize("mode", MODES)
def test_the_best_level_waits_two_full_steps_at_most_under_ten_times_the_load(mode: str) -> None:
    """Each request takes one step. One in forty has level 0, and these alone are a quarter of the engine's capacity."""
    rows = 1 if mode == "none" else ROWS
    window = 1.0 if mode in ("static", "dynamic") else None
    scheduler = make_scheduler(
        mode, max_num_seqs=rows, max_num_queued_requests=10_000, batching_window_seconds=window, num_kv_blocks=64
    )
    waits, numbers = list[float](), count()
    for second in map(float, range(60)):
        for number in islice(numbers, 10 * rows):
            level = 0 if number % 40 == 0 else 50
            request = make_request(f"{level} {number}", 4, max_tokens=1, level=level, arrival_time=second)
            scheduler.add_request(request)
        best = {name: second - r.arrival_time for name, r in scheduler.requests.items() if r.level == 0}
        waits += [best[name] for name in run_step(scheduler, now=second) if name in best]
    assert len(waits) >= 60 * rows // 4 - 2
    assert len(scheduler.waiting) > 8 * 60 * rows, "the others wait"
    assert quantiles(waits, n=100)[98] <= 2


def test_a_level_that_starves_has_its_turn_when_the_bound_says_so() -> None:
    """Level 0 alone is twice the engine's capacity. A request of level 2 waits for two levels of ageing."""
    scheduler = make_scheduler(max_num_seqs=1, max_num_queued_requests=10_000)
    scheduler.add_request(make_request("worse", 1, max_tokens=1, level=2, arrival_time=0.0))
    for second in range(1, 1000):
        for number in range(2):
            request = make_request(f"{second} {number}", 1, max_tokens=1, arrival_time=float(second))
            scheduler.add_request(request)
        if "worse" in run_step(scheduler, now=float(second)):
            break
    came_before = 2 * (2 * LEVEL_AGEING_SECONDS)  # the requests of level 0 that go first, and each takes a second
    assert second == pytest.approx(came_before, abs=2)
    ends = [output.finish_reason for step in run_all(scheduler) for output in step.values()]
    assert set(ends) == {FinishReason.LENGTH}
