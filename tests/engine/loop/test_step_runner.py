"""Tests steps that raise: which requests continue, which end, and when the engine ends."""

import pytest
from tests.engine.builders import make_request, make_scheduler
from tests.engine.pretended_constraints import PretendedMasks, TardySumModThree, next_token
from tests.engine.pretended_model import PretendedModel

from conveyor_engine.loop.executor import Sample
from conveyor_engine.loop.step_runner import FAILED, run_step
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_engine.wire.step import StepPlan


def run_all(scheduler: Scheduler, model: PretendedModel) -> dict[str, RequestOutput]:
    """Run all requests and compare their answers with the model's. Returns the last outputs by request id."""
    last: dict[str, RequestOutput] = {}
    tokens: dict[str, list[int]] = {}
    prompts = {name: list(state.token_ids[: state.num_prompt_tokens]) for name, state in scheduler.requests.items()}
    for _ in range(1000):
        plan = scheduler.schedule(100.0)
        if plan is not None:
            run_step(scheduler, model, plan)
        for output in scheduler.take_outputs():
            tokens[output.request_id] = tokens.get(output.request_id, []) + output.new_token_ids
            last[output.request_id] = output
        scheduler.blocks.check([r.block_table for r in scheduler.running])
        if not scheduler.has_unfinished():
            break
    for name, token_ids in tokens.items():
        for token_id in token_ids:
            assert token_id == next_token(prompts[name])
            prompts[name].append(token_id)
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks
    return last


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(100.0)
    assert plan is not None
    return plan


@pytest.mark.parametrize("mode", ["static", "dynamic", "continuous"])
@pytest.mark.parametrize("poisoned", ["a", "d", "ac", "abd", "abcd"])
def test_requests_that_the_model_cannot_compute_end_alone(mode: str, poisoned: str) -> None:
    scheduler, model = make_scheduler(mode), PretendedModel(4)
    for name in "abcd":
        scheduler.add_request(make_request(name, [ord(name)] * 5))
    model.poison |= {scheduler.requests[name].sampling.seed for name in poisoned}
    last = run_all(scheduler, model)
    ended = {name: (output.finish_reason, output.message) for name, output in last.items()}
    assert ended == {
        name: (FinishReason.ERROR, FAILED) if name in poisoned else (FinishReason.LENGTH, ended[name][1])
        for name in "abcd"
    }


def test_a_step_too_large_for_the_memory_fails_nobody() -> None:
    scheduler, model = make_scheduler(), PretendedModel(4)
    model.memory_tokens = 16
    for name in "abcd":
        scheduler.add_request(make_request(name, [ord(name)] * 8))
    assert {output.finish_reason for output in run_all(scheduler, model).values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("mode", ["static", "dynamic", "continuous"])
def test_with_states_a_request_that_the_model_cannot_compute_ends_alone(mode: str) -> None:
    scheduler, model = make_scheduler(mode, has_states=True), PretendedModel(4, has_states=True)
    for name in "abcd":
        scheduler.add_request(make_request(name, [ord(name)] * 5, max_tokens=9))
    for _ in range(3):
        run_step(scheduler, model, planned(scheduler))
    model.poison.add(scheduler.requests["c"].sampling.seed)
    last = run_all(scheduler, model)
    assert {name for name, output in last.items() if output.finish_reason is FinishReason.LENGTH} == {*"abd"}
    assert (last["c"].finish_reason, last["c"].message) == (FinishReason.ERROR, FAILED)
    assert scheduler.stats().num_preemptions == 4, "each request began again once"


def test_with_states_steps_that_fail_only_together_end_nobody() -> None:
    scheduler, model = make_scheduler(has_states=True), PretendedModel(4, has_states=True)
    model.memory_tokens = 8
    for name in "abcd":
        scheduler.add_request(make_request(name, [ord(name)] * 8, max_tokens=5))
    assert {output.finish_reason for output in run_all(scheduler, model).values()} == {FinishReason.LENGTH}


def test_with_states_late_masks_let_a_row_begin_again_once_at_most() -> None:
    masks = PretendedMasks()
    scheduler = make_scheduler(
        has_states=True, masks=masks, constrain=lambda _: TardySumModThree(masks, [3, 1, 2, 3, 4], 1000)
    )
    masks.on_ready = scheduler.look_again
    model = PretendedModel(4, has_states=True)
    scheduler.add_request(make_request(prompt=[97] * 5, max_tokens=12))
    for _ in range(200):
        masks.tick()
        if (plan := scheduler.schedule(100.0)) is not None:
            run_step(scheduler, model, plan)
    tokens = [token for output in scheduler.take_outputs() for token in output.new_token_ids]
    assert len(tokens) == 12
    assert scheduler.stats().num_preemptions == 1


def test_whoever_shares_a_prefix_that_was_not_written_computes_it() -> None:
    scheduler, model = make_scheduler(), PretendedModel(4)
    for name in "abcd":
        scheduler.add_request(make_request(name, [*range(100, 112), ord(name)]))
    model.poison.add(scheduler.requests["a"].sampling.seed)
    last = run_all(scheduler, model)
    assert [last[name].finish_reason for name in "abcd"] == [FinishReason.ERROR, *[FinishReason.LENGTH] * 3]


def test_a_finished_row_keeps_its_answer_when_a_later_step_of_its_batch_fails() -> None:
    scheduler, model = make_scheduler("static", padding="real"), PretendedModel(4)
    scheduler.add_request(make_request("short", max_tokens=1))
    scheduler.add_request(make_request("long", [5], max_tokens=9))
    while not scheduler.requests["short"].finished:
        run_step(scheduler, model, planned(scheduler))
    model.memory_tokens = 0
    with pytest.raises(RuntimeError):
        run_step(scheduler, model, planned(scheduler))
    model.memory_tokens = 100
    last = {}
    while scheduler.has_unfinished():
        scheduler.schedule(100.0)
        last |= {output.request_id: output for output in scheduler.take_outputs()}
    assert (last["short"].finish_reason, len(last["short"].new_token_ids)) == (FinishReason.LENGTH, 1)
    assert last["long"].finish_reason is FinishReason.ERROR


class Broken(PretendedModel):
    """A device on which all steps fail."""

    def begin(self, plan: StepPlan) -> Sample:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_broken_device_ends_the_engine_with_its_own_words(caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler()
    for name in "abcd":
        scheduler.add_request(make_request(name))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run_step(scheduler, Broken(4), planned(scheduler))
    assert [bool(record.exc_info) for record in caplog.records] == [True, False, False], "one traceback"
