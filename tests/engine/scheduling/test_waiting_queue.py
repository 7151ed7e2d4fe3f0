"""Tests the order of waiting requests: parties take turns, and the costs do not depend on the queue's length."""

from collections.abc import Iterator

import pytest
from tests.engine.builders import make_request, make_scheduler, make_state, names_of, run_all, run_step, work_of

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.waiting_queue import Bucket, WaitingQueue

MODES = ["none", "static", "dynamic", "continuous"]


def queue_of(*names: str) -> tuple[WaitingQueue, dict[str, RequestState]]:
    """Make a queue of requests that are named by their party and their number in it."""
    queue = WaitingQueue(lambda request: 0)
    requests = {name: make_state(request_id=name, party=name[0]) for name in names}
    for request in requests.values():
        queue.add(request)
    return queue, requests


def test_parties_take_turns_and_are_first_come_first_served_within_and_among_themselves() -> None:
    queue, _ = queue_of("a0", "a1", "a2", "b0", "b1", "c0")
    assert names_of(queue) == ["a0", "b0", "c0", "a1", "b1", "a2"]


def test_who_has_had_a_turn_is_behind_those_who_came_since() -> None:
    queue, requests = queue_of("a0", "a1", "a2", "b0", "b1")
    queue.pop(requests["a0"])
    queue.add(make_state(request_id="c0"))
    assert names_of(queue) == ["b0", "a1", "c0", "b1", "a2"]


def test_who_was_preempted_comes_back_before_all_and_that_is_no_turn() -> None:
    queue, requests = queue_of("a0", "a1", "a2", "b0")
    for name in ("a0", "a1"):
        queue.pop(requests[name])
    assert names_of(queue) == ["b0", "a2"]
    for name in ("a1", "a0"):
        queue.add_preempted(requests[name])
    queue.pop(requests["b0"])
    queue.add(make_state(request_id="b1", party="b"))
    assert names_of(queue) == ["a0", "a1", "a2", "b1"]
    queue.pop(requests["a0"])
    assert names_of(queue) == ["a1", "a2", "b1"]


def test_better_levels_go_first_and_parties_of_one_level_take_turns() -> None:
    queue = WaitingQueue(lambda request: 0)
    for name, level in (("a0", 5), ("a1", 5), ("b0", 5), ("c0", 0), ("c1", 0), ("d0", 0)):
        queue.add(make_state(request_id=name, party=name[0], level=level))
    assert names_of(queue) == ["c0", "d0", "c1", "a0", "b0", "a1"]


def test_a_deadline_that_is_near_goes_first_within_its_level() -> None:
    queue = WaitingQueue(lambda request: 0)
    for name, level, deadline in (("a", 0, 600.0), ("b", 0, 20.0), ("c", 1, 0.1), ("d", 0, 10.0), ("e", 0, 100.0)):
        queue.add(make_state(request_id=name, level=level, deadline=deadline))
    assert names_of(queue) == ["d", "b", "a", "e", "c"]


def test_who_leaves_is_nowhere() -> None:
    queue, requests = queue_of("a0", "a1", "b0")
    queue.add(returning := make_state(request_id="c0"))
    queue.pop(returning)
    queue.add_preempted(returning)
    for request in (requests["a1"], requests["b0"], returning):
        assert queue.remove(request)
        assert not queue.remove(request)
    assert names_of(queue) == ["a0"]
    assert len(queue) == 1
    assert queue.remove(requests["a0"])
    assert not queue.buckets


@pytest.mark.parametrize("mode", MODES)
def test_one_request_waits_for_a_batch_of_somebody_elses_many_and_not_for_all(mode: str) -> None:
    scheduler = make_scheduler(mode, max_num_seqs=1 if mode == "none" else 4, max_num_queued_requests=100)
    for number in range(50):
        scheduler.add_request(make_request(f"many {number}", 4, max_tokens=1, party="many"))
    run_step(scheduler, now=100.0)
    scheduler.add_request(make_request("one", 4, max_tokens=1, arrival_time=100.0))
    ends = [name for step in run_all(scheduler, now=100.0) for name in step]
    assert len(ends) == (50 if mode == "none" else 47)
    assert ends.index("one") < 4


def test_a_step_that_failed_is_halved_in_the_order_of_admission() -> None:
    scheduler = make_scheduler()
    for name, party in (("many 0", "many"), ("many 1", "many"), ("one", "one")):
        scheduler.add_request(make_request(name, party=party))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert [list(work_of(scheduler, half)) for half in scheduler.halve(plan)] == [["many 0", "one"], ["many 1"]]


@pytest.mark.parametrize("mode", MODES)
def test_a_step_looks_at_no_more_requests_than_it_may_take(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_seen = 0
    by_turns = Bucket.__iter__

    def counting(bucket: Bucket) -> Iterator[RequestState]:
        nonlocal num_seen
        for request in by_turns(bucket):
            num_seen += 1
            yield request

    monkeypatch.setattr(Bucket, "__iter__", counting)
    scheduler = make_scheduler(mode, max_num_seqs=1 if mode == "none" else 4, max_num_queued_requests=2000)
    for number in range(1000):
        scheduler.add_request(make_request(f"alone {number}", 30, max_tokens=1))
        scheduler.add_request(make_request(f"many {number}", 30, max_tokens=1, party="many"))
    for _ in range(20):
        scheduler.next_wakeup(100.0)
        run_step(scheduler, now=100.0)
    assert num_seen <= 20 * 3 * 32
