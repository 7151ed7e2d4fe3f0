"""Tests that requests wait for the features of their images while other requests go on."""

from typing import Any

import msgspec
from tests.engine.builders import make_request, make_scheduler, run_step, work_of

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest
from conveyor_engine.wire.step import StepPlan, StepResult


def make_seeing(name: str, *places: tuple[int, int]) -> EngineRequest:
    spans = [PictureSpan(begin, end, f"{name} {begin}".encode()) for begin, end in places]
    return make_request(name, 20, pictures=spans, payload=name.encode())


def make_waiting_scheduler(**changes: Any) -> Scheduler:
    return make_scheduler(encodes_beside=True, **changes)


def step(scheduler: Scheduler, *encoded: str) -> tuple[StepPlan, dict[str, int], list[str]]:
    """Run a step in which these pictures are encoded. Returns its plan, its tokens and what it encodes."""
    plan = scheduler.schedule(0.0)
    assert plan is not None
    work = work_of(scheduler, plan)
    scheduler.update(StepResult(plan.number, [[7]] * sum(plan.num_logits), encoded=[name.encode() for name in encoded]))
    return plan, work, [each.digest.decode() for each in plan.wanted_pictures]


def test_a_request_waits_for_its_images_while_others_decode() -> None:
    scheduler = make_waiting_scheduler()
    scheduler.add_request(make_request("text", [1, 2, 3], max_tokens=20))
    step(scheduler)
    scheduler.add_request(make_seeing("seen", (5, 9), (12, 15)))
    assert [step(scheduler)[1:] for _ in range(5)] == [({"text": 1, "seen": 1}, [])] * 5
    plan, *rest = step(scheduler)
    assert rest == [{"text": 1}, ["seen 5"]]
    assert plan.wanted_pictures[0].payload == b"seen"
    assert step(scheduler, "seen 5")[1:] == ({"text": 1}, ["seen 5"])
    assert [step(scheduler)[1:] for _ in range(7)] == [({"text": 1, "seen": 1}, [])] * 7
    assert step(scheduler, "seen 12")[1:] == ({"text": 1}, ["seen 12"])
    assert [step(scheduler)[1]["seen"] for _ in range(4)] == [1, 1, 1, 5]


def test_a_prompt_has_a_small_share_of_steps_with_decodes_until_its_images_are_computed() -> None:
    scheduler = make_waiting_scheduler(max_num_batched_tokens=64)
    scheduler.add_request(make_request("text", [1, 2, 3], max_tokens=30))
    step(scheduler)
    scheduler.add_request(make_seeing("seen", (2, 7)))
    assert step(scheduler)[1] == {"text": 1, "seen": 2}
    assert step(scheduler, "seen 2")[1] == {"text": 1}
    assert [step(scheduler)[1]["seen"] for _ in range(4)] == [2, 2, 2, 12]


def test_a_step_without_tokens_encodes_if_all_requests_wait() -> None:
    scheduler = make_waiting_scheduler()
    scheduler.add_request(make_seeing("seen", (0, 9)))
    assert step(scheduler)[1:] == ({}, ["seen 0"])
    assert step(scheduler, "seen 0")[1:] == ({}, ["seen 0"])
    assert step(scheduler)[1] == {"seen": 20}


def test_requests_take_turns_after_each_image() -> None:
    scheduler = make_waiting_scheduler()
    scheduler.add_request(make_seeing("many", (0, 2), (2, 4), (4, 6)))
    scheduler.add_request(make_seeing("one", (0, 9)))
    assert step(scheduler, "many 0")[2] == ["many 0", "one 0"]
    assert step(scheduler)[1] == {"many": 2}
    assert step(scheduler)[2] == ["one 0", "many 2"]


def test_a_preempted_or_aborted_request_wants_no_image() -> None:
    scheduler = make_waiting_scheduler()
    scheduler.add_request(make_seeing("a", (0, 9)))
    scheduler.add_request(make_seeing("b", (0, 9)))
    assert step(scheduler, "a 0")[2] == ["a 0", "b 0"]
    scheduler.abort("b")
    assert step(scheduler)[2] == []
    request = scheduler.requests["a"]
    scheduler._batch.preempt(request)
    assert request.num_encoded == 0


def test_a_plan_with_wanted_images_names_those_that_rows_still_need() -> None:
    scheduler = make_waiting_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_seeing("a", (0, 9)))
    scheduler.add_request(make_seeing("b", (0, 9)))
    assert step(scheduler, "a 0")[0].held_pictures == []
    assert [step(scheduler)[0].held_pictures for _ in range(3)] == [[b"a 0"], [b"a 0"], []]


def test_an_aborted_request_needs_no_image() -> None:
    scheduler = make_waiting_scheduler(max_num_batched_tokens=8)
    scheduler.add_request(make_seeing("a", (0, 9)))
    scheduler.add_request(make_seeing("b", (0, 9)))
    step(scheduler, "a 0")
    scheduler.abort("a")
    assert step(scheduler)[0].held_pictures == []


def test_an_image_in_the_prefix_cache_is_not_wanted() -> None:
    scheduler = make_waiting_scheduler()
    request = make_seeing("first", (0, 9))
    scheduler.add_request(request)
    assert step(scheduler, "first 0")[1:] == ({}, ["first 0"])
    while scheduler.has_unfinished():
        run_step(scheduler)
    scheduler.add_request(msgspec.structs.replace(request, request_id="again", prompt_hashes=[]))
    assert step(scheduler)[1:] == ({"again": 4}, [])


def test_closed_batches_encode_images_in_their_steps() -> None:
    for mode in ("none", "static", "dynamic"):
        scheduler = make_waiting_scheduler(mode=mode, batching_window_seconds=None if mode == "none" else 0.0)
        scheduler.add_request(make_seeing("seen", (0, 9)))
        assert step(scheduler)[1:] == ({"seen": 20}, [])
