"""Tests that no step ends within an image if the tokens of images see each other."""

from typing import Any

import pytest
from tests.engine.builders import make_request, make_scheduler, run_step, work_of

from conveyor_engine.errors import InvalidRequest
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.pictures import PictureSpan


def spans(*places: tuple[int, int]) -> list[PictureSpan]:
    return [PictureSpan(begin, end, bytes([begin])) for begin, end in places]


def make_whole_scheduler(**changes: Any) -> Scheduler:
    return make_scheduler(whole_images=True, **changes)


def steps_of(scheduler: Scheduler, name: str) -> list[int]:
    """Run the request's prompt. Returns its tokens in each step."""
    steps = []
    while name in scheduler.requests and not scheduler.requests[name].num_output_tokens:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        steps.append(work_of(scheduler, plan).get(name, 0))
        scheduler.withdraw(plan)
        run_step(scheduler)
    return steps


@pytest.mark.parametrize(
    ("images", "steps"),
    [
        (((3, 12),), [3, 10, 10, 7]),  # it ends before an image, and computes the next one whole
        (((0, 10), (12, 21)), [10, 2, 10, 8]),
        (((8, 9), (13, 18)), [10, 10, 10]),
    ],
)
def test_a_step_ends_before_an_image_or_behind_it(images: tuple[tuple[int, int], ...], steps: list[int]) -> None:
    scheduler = make_whole_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 30, pictures=spans(*images)))
    assert steps_of(scheduler, "a") == steps


def test_other_models_compute_images_in_parts() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    scheduler.add_request(make_request("a", 30, pictures=spans((3, 12))))
    assert steps_of(scheduler, "a") == [10, 10, 10]


def test_an_image_may_exceed_the_share_of_long_prompts_but_not_the_step() -> None:
    scheduler = make_whole_scheduler(max_num_batched_tokens=16, max_num_seqs=8, num_kv_blocks=256)
    for number in range(3):
        scheduler.add_request(make_request(f"decode {number}", [number], max_tokens=10))
    run_step(scheduler)
    scheduler.add_request(make_request("seen", 40, pictures=spans((0, 12), (16, 30))))
    # A share of 4 tokens, beside 3 decodes. The image of 14 tokens waits until there is at most 1 more decode.
    assert work_of(scheduler, scheduler.schedule(0.0))["seen"] == 12
    scheduler = make_whole_scheduler(max_num_batched_tokens=16, max_num_seqs=8, num_kv_blocks=256)
    for number in range(3):
        scheduler.add_request(make_request(f"decode {number}", [number], max_tokens=2 + number))
    run_step(scheduler)
    scheduler.add_request(make_request("seen", [500 + number for number in range(20)], pictures=spans((0, 15))))
    assert steps_of(scheduler, "seen")[:3] == [0, 0, 15]


def test_a_prefix_may_end_within_an_image_whose_rest_is_computed_in_one_step() -> None:
    scheduler = make_whole_scheduler(max_num_batched_tokens=16, block_size=4)
    scheduler.add_request(make_request("first", 13, pictures=spans((2, 13)), max_tokens=1))
    run_step(scheduler)
    scheduler.add_request(make_request("shares", 30, pictures=spans((2, 13), (14, 29))))
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.num_computed_tokens == [12]
    assert plan.num_tokens == [2]  # the last token of the first image, and the one before the second image


def test_an_image_that_no_step_can_compute_is_rejected() -> None:
    scheduler = make_whole_scheduler(max_num_batched_tokens=10)
    with pytest.raises(InvalidRequest, match=r"an image has 11 tokens.*at most 10"):
        scheduler.add_request(make_request("a", 30, pictures=spans((3, 14))))
    scheduler.add_request(make_request("b", 30, pictures=spans((3, 13))))


def test_log_probabilities_of_a_prompt_with_images_are_rejected() -> None:
    scheduler = make_whole_scheduler()
    with pytest.raises(InvalidRequest, match="no log probabilities"):
        scheduler.add_request(make_request("a", 30, pictures=spans((3, 14)), prompt_logprobs=1))
    make_scheduler().add_request(make_request("a", 30, pictures=spans((3, 14)), prompt_logprobs=1))
