"""Tests that requests that can no longer meet their deadlines, and no others, are dropped before they cost a step."""

from random import Random
from typing import Any

import pytest
from tests.engine.builders import make_request, make_scheduler, names_of, run_step
from tests.engine.pretended_constraints import SumModThree

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import FinishReason

MODES = ["none", "static", "dynamic", "continuous"]


def make(mode: str = "continuous", **changes: Any) -> Scheduler:
    return make_scheduler(mode, **{"max_num_seqs": 1, "num_kv_blocks": 64, "max_num_queued_requests": 100} | changes)


def run_steps(scheduler: Scheduler, number: int, seconds: float) -> float:
    """Run steps of one long request, each of which takes this long. Returns the time after them."""
    scheduler.add_request(make_request("busy", 1, max_tokens=number, ignore_eos=True))
    now = 100.0
    for _ in range(number):
        run_step(scheduler, now=now)
        now += seconds
    assert not scheduler.running
    return now


@pytest.mark.parametrize("mode", MODES)
def test_a_request_past_its_deadline_costs_no_step_and_gets_a_clear_error(mode: str) -> None:
    scheduler = make(mode)
    scheduler.add_request(make_request("late", 4, arrival_time=1.0, deadline=5.0))
    scheduler.add_request(make_request("in time", 4, arrival_time=1.0, deadline=50.0))
    outputs = run_step(scheduler, now=5.0)
    assert outputs["late"].finish_reason == FinishReason.DEADLINE
    assert outputs["late"].message == "the request's time ran out while it waited for a batch"
    assert outputs["late"].scheduled_time == 0.0
    assert names_of(scheduler.running) == ["in time"]
    assert (scheduler.stats().step_num_seqs, scheduler.stats().prompt_tokens, scheduler.stats().num_late) == (1, 4, 1)


def test_a_queue_of_late_requests_costs_no_step_at_all() -> None:
    scheduler = make(max_num_seqs=4)
    for number in range(50):
        scheduler.add_request(make_request(str(number), 4, arrival_time=0.0, deadline=1.0 + number / 100))
    assert scheduler.next_wakeup(0.0) == 0.0
    outputs = run_step(scheduler, now=2.0)
    assert len(outputs) == 50
    assert {output.finish_reason for output in outputs.values()} == {FinishReason.DEADLINE}
    assert (scheduler.stats().num_steps, scheduler.stats().num_late) == (0, 50)
    assert not scheduler.has_unfinished()
    assert not scheduler.waiting


def test_an_answer_that_needs_more_steps_than_its_time_allows_is_not_begun() -> None:
    scheduler = make()
    now = run_steps(scheduler, 20, 0.5)
    sized: dict[str, Any] = {"ignore_eos": True, "arrival_time": now}
    scheduler.add_request(make_request("hopeless", 4, max_tokens=10, deadline=now + 4.9, **sized))
    scheduler.add_request(make_request("just", 4, max_tokens=10, deadline=now + 5.1, **sized))
    scheduler.add_request(make_request("may end early", 4, max_tokens=10, deadline=now + 4.9, arrival_time=now))
    outputs = run_step(scheduler, now=now)
    assert (
        outputs["hopeless"].message
        == "the request has 4.9 s left and would take 5 s at the present pace: it was not begun"
    )
    assert set(scheduler.requests) == {"just", "may end early"}
    assert scheduler.stats().num_late == 1


@pytest.mark.parametrize("others_end", [False, True])
def test_the_last_steps_decide_until_the_engine_is_idle(others_end: bool) -> None:
    scheduler = make(max_num_seqs=2)
    now = run_steps(scheduler, 20, 0.1)
    scheduler.add_request(make_request("busy", 1, max_tokens=60, ignore_eos=True, arrival_time=now))
    for _ in range(40):
        run_step(scheduler, now=now)
        now += 1.0
    if others_end:
        scheduler.abort("busy")
    sized: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "arrival_time": now}
    scheduler.add_request(make_request("hopeless now", 4, deadline=now + 5, **sized))
    scheduler.add_request(make_request("just", 4, deadline=now + 10.1, **sized))
    outputs = run_step(scheduler, now=now)
    assert ("hopeless now" in scheduler.requests) == others_end
    assert "just" in scheduler.requests
    if not others_end:
        message = "the request has 5 s left and would take 10 s at the present pace: it was not begun"
        assert outputs["hopeless now"].message == message


@pytest.mark.parametrize(("mode", "least"), [("dynamic", 0.5), ("continuous", 0.75)])
def test_beyond_capacity_most_of_the_time_goes_to_requests_that_end_in_time(mode: str, least: float) -> None:
    """In virtual time: 1.5 times as many requests as the engine can do. Each has 20 steps, slower ones with more rows.

    The figures of ADR 210 are from more of them.
    """
    rows, steps, fixed, of_row = 8, 20, 1.0, 0.35
    capacity = rows / steps / (fixed + of_row * rows)
    random = Random(1)
    scheduler = make(mode, max_num_seqs=rows, num_kv_blocks=1000, max_num_queued_requests=1000)
    arrivals = [100.0]
    while len(arrivals) < 300:
        arrivals.append(arrivals[-1] + random.expovariate(1.5 * capacity))
    deadlines = {str(number): at + 4 * steps * (fixed + of_row) for number, at in enumerate(arrivals)}
    now, number, in_time = 100.0, 0, 0
    while number < len(arrivals) or scheduler.has_unfinished():
        while number < len(arrivals) and arrivals[number] <= now:
            at, name = arrivals[number], str(number)
            scheduler.add_request(
                make_request(name, 1, max_tokens=steps, ignore_eos=True, arrival_time=at, deadline=deadlines[name])
            )
            number += 1
        outputs = run_step(scheduler, now=now)
        now += fixed + of_row * scheduler.stats().step_num_seqs
        in_time += sum(
            output.finish_reason == FinishReason.LENGTH and now <= deadlines[name] for name, output in outputs.items()
        )
    assert in_time / (now - 100.0) > least * capacity


def test_steps_that_become_faster_let_requests_begin() -> None:
    scheduler = make()
    scheduler.add_request(make_request("busy", 1, max_tokens=60, ignore_eos=True))
    now = 100.0
    for number in range(59):
        if number == 40:
            sized: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "arrival_time": now}
            scheduler.add_request(make_request("later", 4, deadline=now + 10.5, **sized))
        run_step(scheduler, now=now)
        now += 1.0 if number < 40 else 0.1
    assert "later" in scheduler.requests


def test_with_drafts_an_answer_may_take_a_fraction_of_the_steps() -> None:
    scheduler = make(
        max_num_seqs=3,
        speculation="ngram",
        speculation_tokens=4,
        constrain=lambda request: SumModThree() if request.request_id == "follows a grammar" else None,
    )
    now = run_steps(scheduler, 20, 0.5)
    sized: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True, "arrival_time": now}
    scheduler.add_request(make_request("hopeless", 4, deadline=now + 0.9, **sized))
    scheduler.add_request(make_request("just", 4, deadline=now + 1.1, **sized))
    scheduler.add_request(make_request("follows a grammar", 4, deadline=now + 4.9, **sized))
    scheduler.schedule(now)
    assert {output.request_id: output.message for output in scheduler.take_outputs()} == {
        "hopeless": "the request has 0.9 s left and would take 1 s at the present pace: it was not begun",
        "follows a grammar": "the request has 4.9 s left and would take 5 s at the present pace: it was not begun",
    }
    assert names_of(scheduler.running) == ["just"]


def test_few_steps_say_nothing_of_how_long_an_answer_takes() -> None:
    """The first steps may be slow, so no request is dropped because of them."""
    scheduler = make()
    now = run_steps(scheduler, 10, 0.5)
    scheduler.add_request(
        make_request("in time", 4, max_tokens=10, ignore_eos=True, arrival_time=now, deadline=now + 1.0)
    )
    assert "in time" in run_step(scheduler, now=now)
    assert scheduler.running


def test_steps_that_have_become_faster_count_for_those_that_wait_already() -> None:
    scheduler = make()
    now = run_steps(scheduler, 20, 0.5)
    scheduler.add_request(make_request("first", 4, max_tokens=31, ignore_eos=True, arrival_time=now))
    run_step(scheduler, now=now)
    scheduler.add_request(
        make_request("waits", 4, max_tokens=10, ignore_eos=True, arrival_time=now, deadline=now + 8.5)
    )
    for _ in range(30):
        now += 0.2
        run_step(scheduler, now=now)
    now += 0.2
    run_step(scheduler, now=now)
    assert names_of(scheduler.running) == ["waits"], "6 s have passed, and it takes two"


def test_an_idle_time_between_two_steps_is_no_slow_step() -> None:
    scheduler = make()
    for number in range(20):
        scheduler.add_request(make_request(str(number), 4, max_tokens=1))
        run_step(scheduler, now=100.0 * number)
        assert scheduler.schedule(100.0 * number + 1) is None
    assert scheduler._deadlines.pace.step_seconds == 1


@pytest.mark.parametrize("mode", ["static", "dynamic"])
def test_a_late_request_that_waits_for_its_window_ends_at_once(mode: str) -> None:
    scheduler = make(mode, max_num_seqs=4, batching_window_seconds=10.0)
    scheduler.add_request(make_request("late", 4, arrival_time=1.0, deadline=5.0))
    scheduler.add_request(make_request("waits", 4, arrival_time=1.0, deadline=50.0))
    assert scheduler.next_wakeup(1.0) == 5.0
    assert set(run_step(scheduler, now=5.0)) == {"late"}
    assert scheduler.next_wakeup(5.0) == 11.0


def test_a_request_that_has_begun_is_not_dropped_here() -> None:
    """Its tokens are being sent to the client, and the API process ends it at its deadline."""
    scheduler = make()
    scheduler.add_request(make_request("a", 4, max_tokens=5, ignore_eos=True, arrival_time=0.0, deadline=1.0))
    run_step(scheduler, now=0.5)
    assert run_step(scheduler, now=2.0)["a"].finish_reason is None
    scheduler.abort("a")
    assert scheduler.stats().num_late == 0
