"""Tests that requests wait for the features of their images while other requests go on."""

from itertools import cycle
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engine.builders import make_request, make_scheduler, run_step, work_of

from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.pictures import PictureSpan
from conveyor_engine.wire.request import EngineRequest
from conveyor_engine.wire.step import StepPlan, StepResult


def make_seeing(name: str, *places: tuple[int, int], level: int = 0) -> EngineRequest:
    spans = [PictureSpan(begin, end, f"{name} {begin}".encode()) for begin, end in places]
    return make_request(name, 20, pictures=spans, payload=name.encode(), level=level)


def make_waiting_scheduler(**changes: Any) -> Scheduler:
    return make_scheduler(encodes_beside=True, **{"num_kv_blocks": 512} | changes)


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


def encode(scheduler: Scheduler, number: int) -> StepPlan | None:
    """Run a step that encodes so many of the images that requests wait for."""
    if (plan := scheduler.schedule(0.0)) is not None:
        encoded = [each.digest for each in plan.wanted_pictures[:number]]
        scheduler.update(StepResult(plan.number, [[7]] * sum(plan.num_logits), encoded=encoded))
    scheduler.take_outputs()
    return plan


def test_requests_that_arrive_together_decode_together() -> None:
    scheduler = make_waiting_scheduler(max_num_seqs=16, max_num_batched_tokens=1024)
    for number in range(16):
        scheduler.add_request(make_seeing(f"{number}", (2, 19)))
    num_steps = 0
    while scheduler.has_unfinished():
        plan = encode(scheduler, 1)
        assert plan is not None
        assert plan.images_first == bool(plan.wanted_pictures)
        num_steps += 1
    assert num_steps == 1 + 16 + 4, "the texts before, an image in each step, and the tokens of the last request"


def test_images_do_not_go_first_beside_as_many_streams() -> None:
    scheduler = make_waiting_scheduler(max_num_seqs=32, max_num_batched_tokens=1024)
    for number in range(3):
        scheduler.add_request(make_request(f"text {number}", [1, 2, 3], max_tokens=20))
    for number in range(3):
        scheduler.add_request(make_seeing(f"seen {number}", (2, 19)))
    plans = [step(scheduler)[0] for _ in range(8)]
    assert [len(plan.wanted_pictures) for plan in plans] == [0] + [3] * 7
    assert not any(plan.images_first for plan in plans)
    scheduler.add_request(make_seeing("one more", (2, 19)))
    assert step(scheduler)[2]
    assert step(scheduler)[0].images_first


@pytest.mark.parametrize(("level", "goes_first"), [(0, False), (5, True)])
def test_images_do_not_go_before_a_more_urgent_stream(level: int, goes_first: bool) -> None:
    scheduler = make_waiting_scheduler(max_num_seqs=32, max_num_batched_tokens=1024)
    scheduler.add_request(make_request("text", [1, 2, 3], max_tokens=20, level=level))
    for number in range(3):
        scheduler.add_request(make_seeing(f"seen {number}", (2, 19), level=5))
    step(scheduler)
    assert step(scheduler)[0].images_first == goes_first


def test_a_prompt_whose_image_goes_first_has_the_share_of_long_prompts() -> None:
    scheduler = make_waiting_scheduler(max_num_batched_tokens=128)
    scheduler.add_request(make_request("text", [1, 2, 3], max_tokens=30))
    step(scheduler)
    for number in range(3):
        scheduler.add_request(make_seeing(f"{number}", (2, 19)))
    assert step(scheduler)[1] == {"text": 1, "0": 2, "1": 2}
    while len(step(scheduler)[2]) < 3:
        pass
    assert step(scheduler, "0 2")[0].images_first
    assert step(scheduler)[1] == {"text": 1, "0": 18}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 3), st.integers(1, 20)), min_size=1),
    st.lists(st.integers(0, 2), min_size=1),
)
def test_images_go_first_for_as_many_as_waited_when_most_requests_waited(
    arrivals: list[tuple[int, bool, int, int]], speeds: list[int]
) -> None:
    """arrivals: steps until then, whether with images, how many, and tokens. speeds: images that steps encode."""
    scheduler = make_waiting_scheduler(max_num_seqs=8, max_num_batched_tokens=256)
    owed, speed, coming = 0, cycle([1, *speeds]), list(enumerate(arrivals))
    until = 0
    while coming or scheduler.has_unfinished():
        until -= 1
        while coming and until <= 0:
            number, (until, sees, num_images, num_tokens) = coming.pop(0)
            places = [(2 + 6 * place, 6 + 6 * place) for place in range(num_images)]
            text = make_request(f"{number}", [1, 2, 3], max_tokens=num_tokens)
            scheduler.add_request(make_seeing(f"{number}", *places) if sees else text)
        before, num_encoded = list(scheduler.running), next(speed)
        rows = [each.row for each in before if each.num_pending_tokens == 1]
        if (plan := encode(scheduler, num_encoded)) is None:
            continue
        num_waiting = len(plan.wanted_pictures)
        owed = num_waiting if 2 * num_waiting > len(before) else min(owed, num_waiting)
        assert plan.images_first == (owed > 0)
        assert set(rows) <= set(plan.rows), "decodes never miss a step"
        owed = max(0, owed - num_encoded)


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
