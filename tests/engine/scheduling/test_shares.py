"""Tests the shares of the batch that high levels may have, and that requests behind them do not wait for it."""

import pytest
from tests.engine.builders import make_request, make_scheduler, make_state, names_of, run_all, run_step
from tests.lines_run import count_lines

from conveyor_engine.scheduling.shares import Shares
from conveyor_engine.scheduling.waiting_queue import WaitingQueue

MODES = ["static", "dynamic", "continuous"]


@pytest.mark.parametrize("mode", MODES)
def test_a_level_and_all_higher_ones_hold_their_share_of_the_rows_together(mode: str) -> None:
    window = None if mode == "continuous" else 1.0
    scheduler = make_scheduler(
        mode, max_num_seqs=8, max_num_queued_requests=100, num_kv_blocks=256, class_shares=((10, 50), (20, 25)),
        batching_window_seconds=window,
    )  # fmt: skip
    for number in range(6):
        for level in (30, 20, 10):
            scheduler.add_request(make_request(f"{level} {number}", max_tokens=4, level=level))
    run_step(scheduler, now=5.0)
    assert sorted(names_of(scheduler.running)) == ["10 0", "10 1", "10 2", "10 3"]
    for number in range(6):
        scheduler.add_request(make_request(f"0 {number}", max_tokens=1, level=0))
    ends = list[str]()
    while scheduler.has_unfinished():
        ends += [name for name, output in run_step(scheduler, now=20.0).items() if output.finish_reason]
        levels = [request.level for request in scheduler.running]
        assert sum(level >= 10 for level in levels) <= 4
        assert sum(level >= 20 for level in levels) <= 2
    assert len(ends) == 24
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_request_that_has_risen_and_does_not_fit_is_passed_over() -> None:
    """Otherwise the best level would wait for the share of the worst level."""
    scheduler = make_scheduler(max_num_seqs=4, class_shares=((5, 25),))
    for number in range(3):
        scheduler.add_request(make_request(f"old {number}", max_tokens=9, level=5))
    run_step(scheduler)
    scheduler.add_request(make_request("new", level=0, arrival_time=1_000.0))
    assert names_of(scheduler.running) == ["old 0"]
    assert "new" in run_step(scheduler, now=1_000.0)


def test_a_level_holds_its_share_of_the_blocks_and_one_request_runs_whatever_its_size() -> None:
    scheduler = make_scheduler(num_kv_blocks=16, max_num_seqs=8, class_shares=((5, 25),), prefix_caching=False)
    scheduler.add_request(make_request("large", [7] * 24, max_tokens=1, level=5))  # 6 blocks of the 4
    scheduler.add_request(make_request("small", [8] * 4, max_tokens=1, level=5))
    assert list(run_step(scheduler)) == ["large"]
    assert list(run_step(scheduler)) == ["small"]
    for name in "abc":
        scheduler.add_request(make_request(name, [9] * 8, max_tokens=2, level=6))
    run_step(scheduler)
    assert names_of(scheduler.running) == ["a", "b"]
    assert [name for step in run_all(scheduler) for name in step][-1] == "c"


def test_nobody_of_a_share_overtakes_the_one_that_does_not_fit() -> None:
    scheduler = make_scheduler(num_kv_blocks=16, max_num_seqs=8, class_shares=((5, 50),), prefix_caching=False)
    for name, length in (("first", 12), ("large", 24), ("small", 4)):
        scheduler.add_request(make_request(name, [7] * length, max_tokens=2, level=5))
    run_step(scheduler)
    assert names_of(scheduler.running) == ["first"]


def test_passing_over_a_share_does_not_cost_by_what_waits_in_it() -> None:
    def cost(number: int) -> int:
        shares = Shares([(5, 50)], 2, 0)
        queue = WaitingQueue(lambda request: 0, shares)
        for index in range(number):
            queue.add(make_state(request_id=str(index), level=5))
        queue.add(make_state(request_id="best", level=0, arrival_time=10_000.0))
        shares.hold(5, 1, 0)
        assert names_of(queue) == ["best"]
        return count_lines(lambda: list(queue), "/conveyor_engine/scheduling/")

    assert cost(3_200) <= 2 * cost(100)
