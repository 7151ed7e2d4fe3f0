"""Tests when requests get drafts, how many, and what becomes of them in the scheduler."""

import tracemalloc
from array import array
from random import Random
from typing import Any

import msgspec
import pytest
from tests.engine.builders import make_facts, make_request, make_scheduler
from tests.engine.pretended_constraints import SumModThree, next_token
from tests.engine.pretended_model import Oracle, PretendedModel

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop import step_runner
from conveyor_engine.loop.executor import Sample
from conveyor_engine.scheduling.drafter import Drafter, Rates
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.speculation import READ_TOKENS, STEPS_PER_TRIAL
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import StepPlan, StepResult

PERIOD = [11, 12, 13, 14, 15]


def make_speculative(**changes: Any) -> Scheduler:
    values: dict[str, Any] = {"speculation": "ngram", "max_model_len": 1024, "num_kv_blocks": 1000}
    return make_scheduler(**(values | {"max_num_batched_tokens": 256} | changes))


def step(scheduler: Scheduler, seconds: float = 1.0, say: Any = None) -> StepPlan:
    """Run a step that takes `seconds` and a hundredth for each draft.

    say: returns a row's next token from the number of its tokens; default: the period goes on.
    """
    say = say or (lambda number: PERIOD[number % len(PERIOD)])
    plan = scheduler.schedule(0.0)
    assert plan is not None
    sampled = []
    drafts_of = [[]] * plan.num_decodes + plan.drafts
    for index, (computed, number, logits) in enumerate(
        zip(plan.num_computed_tokens, plan.num_tokens, plan.num_logits, strict=True)
    ):
        if not logits:
            continue
        drafts = drafts_of[index] if index < len(drafts_of) else []
        tokens = [say(computed + number - len(drafts))]
        while tokens == drafts[: len(tokens)]:
            tokens.append(say(computed + number - len(drafts) + len(tokens)))
        sampled.append(tokens)
    open_step = scheduler._batch.step(plan.number)
    scheduler.update(StepResult(plan.number, sampled))
    assert scheduler.speculation is not None
    scheduler.speculation.observe(open_step, seconds * (1 + sum(map(len, plan.drafts)) / 100))
    return plan


def run_to_end(scheduler: Scheduler, **how: Any) -> list[StepPlan]:
    plans = []
    while scheduler.has_unfinished():
        plans.append(step(scheduler, **how))
        scheduler.take_outputs()
    return plans


def test_a_text_that_repeats_itself_takes_a_fraction_of_the_steps_and_every_token_is_the_model_s() -> None:
    scheduler = make_speculative()
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=200))
    tokens, num_steps = [], 0
    while scheduler.has_unfinished():
        step(scheduler)
        num_steps += 1
        for output in scheduler.take_outputs():
            tokens += output.new_token_ids
    assert tokens == [PERIOD[number % 5] for number in range(20, 220)]
    assert num_steps < 40
    stats = scheduler.stats()
    assert stats.generation_tokens == 200
    assert stats.num_accepted_tokens == stats.num_draft_tokens == 200 - num_steps
    assert 0 < stats.num_drafts <= num_steps


def test_a_text_without_repetition_has_few_drafts_and_soon_none() -> None:
    """A few matches by chance are tried, until they are known to be wrong."""
    scheduler = make_speculative()
    random = Random(3)
    scheduler.add_request(make_request("a", [random.randrange(10, 16) for _ in range(100)], max_tokens=800))
    plans = run_to_end(scheduler, say=lambda number: Random(number).randrange(10, 16))
    num_drafts = [sum(map(len, plan.drafts)) for plan in plans]
    assert sum(num_drafts[400:]) * 0.01 < 0.02 * len(num_drafts[400:])


def test_drafts_that_cost_more_than_they_save_stop_and_are_tried_again_after_many_steps() -> None:
    scheduler = make_speculative(max_model_len=20_000, num_kv_blocks=10_000)
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=4 * STEPS_PER_TRIAL))
    assert scheduler.speculation is not None
    num_drafts = []
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        assert plan is not None
        open_step = scheduler._batch.step(plan.number)
        drafts = sum(map(len, plan.drafts))
        num_drafts.append(drafts)
        number = len(scheduler.running[0].token_ids)
        tokens = [PERIOD[place % 5] for place in range(number, number + 1 + drafts)]
        scheduler.update(StepResult(plan.number, [tokens]))
        scheduler.speculation.observe(open_step, 1.0 + 2.0 * open_step.num_prompt_tokens)  # each costs two steps
        scheduler.take_outputs()
    assert 0 < sum(map(bool, num_drafts)) <= 8 * 4
    assert any(num_drafts[STEPS_PER_TRIAL:])


def test_drafts_stop_too_if_each_step_has_a_prompt() -> None:
    scheduler = make_speculative()
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=400))
    assert scheduler.speculation is not None
    num_drafts: list[int] = []
    for number in range(200):
        scheduler.add_request(make_request(str(number), [number + 20, 7, 8, 9], max_tokens=1))
        plan = scheduler.schedule(0.0)
        assert plan is not None
        num_drafts.append(sum(map(len, plan.drafts)))
        open_step = scheduler._batch.step(plan.number)
        scheduler.update(StepResult(plan.number, [[PERIOD[(20 + number) % 5]], [7]]))
        scheduler.speculation.observe(open_step, 1.0 + 2.0 * open_step.num_prompt_tokens)
        scheduler.take_outputs()
    assert any(num_drafts)
    assert not any(num_drafts[100:])


def test_many_rows_get_fewer_drafts_than_one() -> None:
    def count(num_rows: int) -> float:
        scheduler = make_speculative(max_num_seqs=16, max_num_batched_tokens=1024)
        for name in range(num_rows):
            scheduler.add_request(make_request(str(name), [*range(20 + name, 30 + name), *PERIOD * 2], max_tokens=30))
        plans = run_to_end(scheduler, say=lambda number: PERIOD[number % 5] if number % 3 else 9)
        return sum(sum(map(len, plan.drafts)) for plan in plans) / num_rows

    assert count(1) > 1.5 * count(16)


def test_a_step_has_room_for_the_logits_of_one_request_s_drafts() -> None:
    scheduler = make_speculative(max_num_seqs=2, speculation_tokens=4)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, PERIOD * 4, max_tokens=60))
    plans = run_to_end(scheduler)
    assert max(sum(plan.num_logits) for plan in plans) == 2 + 4


def test_a_full_cache_gives_drafts_no_blocks() -> None:
    scheduler = make_speculative(num_kv_blocks=12, block_size=4, max_model_len=48)
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=28))
    plans = run_to_end(scheduler)
    assert any(plan.drafts for plan in plans)
    assert not any(plan.drafts for plan in plans[-3:])
    assert scheduler.stats().num_preemptions == 0


def test_an_end_of_text_among_accepted_drafts_ends_the_answer_there() -> None:
    scheduler = make_speculative()
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=100, stop_token_ids=(14,), min_tokens=12))
    outputs = []
    while scheduler.has_unfinished():
        step(scheduler)
        outputs += scheduler.take_outputs()
    tokens = [token for output in outputs for token in output.new_token_ids]
    assert tokens == [PERIOD[number % 5] for number in range(20, 34)]
    assert outputs[-1].finish_reason == FinishReason.STOP
    assert scheduler.stats().num_accepted_tokens > 4
    assert scheduler.blocks.num_free == scheduler.blocks.num_blocks


def test_a_request_that_follows_a_grammar_has_no_drafts() -> None:
    constraint = SumModThree()
    constraint.accept = lambda token_id: None  # type: ignore[method-assign]
    scheduler = make_speculative(constrain=lambda request: constraint if request.request_id == "a" else None)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, PERIOD * 4, max_tokens=30))
    drafted = set()
    while scheduler.has_unfinished():
        names = {request.row: request.request_id for request in scheduler.running}
        plan = step(scheduler)
        drafted |= {names[row] for row in plan.rows[plan.num_decodes :][: len(plan.drafts)]}
        scheduler.take_outputs()
    assert drafted == {"b"}


def test_a_long_prompt_is_read_in_parts() -> None:
    scheduler = make_speculative(max_model_len=10_000, num_kv_blocks=10_000, max_num_batched_tokens=9000)
    scheduler.add_request(make_request("a", PERIOD * 1000, max_tokens=40))
    plans = run_to_end(scheduler)
    first = next(index for index, plan in enumerate(plans) if plan.drafts)
    assert first == 5000 // READ_TOKENS + 1


def test_a_long_prediction_delays_the_drafts_of_no_other_request() -> None:
    scheduler = make_speculative()
    request = make_request("a", range(100, 120), max_tokens=100)
    scheduler.add_request(msgspec.structs.replace(request, prediction=[7] * (100 * READ_TOKENS)))
    scheduler.add_request(make_request("b", PERIOD * 4, max_tokens=100))
    assert any(step(scheduler).drafts for _ in range(3))


def test_a_step_copies_only_what_it_reads_of_a_prediction_that_many_choices_share() -> None:
    prediction, most = array("I", range(130_000)), READ_TOKENS
    tracemalloc.start()
    drafters = [Drafter(100, Rates(1), prediction) for _ in range(16)]
    for drafter in drafters:
        most -= drafter.read(array("I", PERIOD), len(PERIOD), most)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_accepted_drafts_after_the_end_of_the_answer_do_not_count() -> None:
    scheduler = make_speculative()
    request = make_request("a", PERIOD * 4, max_tokens=30, stop_token_ids=(PERIOD[1],))
    scheduler.add_request(msgspec.structs.replace(request, prediction=PERIOD * 4))
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    drafts = plan.drafts[0]
    assert len(drafts) >= 3
    scheduler.update(StepResult(plan.number, [[*drafts, 99]]))
    output = scheduler.take_outputs()[-1]
    assert output.finish_reason is FinishReason.STOP
    assert output.num_predicted == (1, len(drafts) - 1)
    assert scheduler.stats().num_accepted_tokens == 1


def test_without_the_setting_there_is_no_speculation() -> None:
    scheduler = Scheduler(EngineConfig(model="none", batching_mode="continuous"), make_facts())
    assert scheduler.speculation is None


def test_a_request_whose_last_token_is_not_known_has_no_drafts() -> None:
    scheduler = make_speculative()
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=30))
    plans = [scheduler.schedule(0.0) for _ in range(3)]
    assert all(plan is not None and not plan.drafts for plan in plans)


@pytest.mark.parametrize("names", ["a", "ab"])
def test_a_step_that_failed_is_run_again_without_drafts(names: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class FailsWithDrafts(PretendedModel):
        num_failed = 0

        def begin(self, plan: StepPlan) -> Sample:
            if plan.drafts:
                self.num_failed += 1
                raise RuntimeError("out of memory")
            return super().begin(plan)

    monkeypatch.setattr(step_runner._log, "disabled", True)
    scheduler = make_speculative()
    scheduler._batch._speculation = Oracle(4, next_token)
    planned_at = []
    scheduler.on_step = lambda step, *_: planned_at.append(step.planned_at)
    model, now, ends = FailsWithDrafts(block_size=4), 100.0, {}
    for name in names:
        scheduler.add_request(make_request(name, max_tokens=60, ignore_eos=True))
    while (plan := scheduler.schedule(now)) is not None:
        step_runner.run_step(scheduler, model, plan)
        ends |= {output.request_id: output.finish_reason for output in scheduler.take_outputs()}
        assert planned_at[-1] == now, "its cost is measured from here"
        now += 1
    assert ends == dict.fromkeys(names, FinishReason.LENGTH)
    assert 1 < model.num_failed < 5, "the steps after it have no drafts, each time twice as many"
    assert not model.wrong


@pytest.mark.parametrize("accepted", [0, 2, 3])
def test_the_counts_of_tokens_after_a_step_with_drafts(accepted: int) -> None:
    scheduler = make_speculative()
    scheduler.add_request(make_request("a", PERIOD * 4, max_tokens=30))
    step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    drafts = plan.drafts[0]
    assert len(drafts) >= 3
    request = scheduler.running[0]
    scheduler.update(StepResult(plan.number, [[*drafts[:accepted], 99]]))
    assert request.num_computed_tokens == request.num_scheduled_tokens == len(request.token_ids) - 1
    assert (request.num_pending_tokens, request.num_awaited_tokens) == (1, 0)
    assert request.num_output_tokens == 2 + accepted


@pytest.mark.parametrize("first", [0, 5])
def test_an_answer_that_was_predicted_takes_fewer_steps_and_its_drafts_are_counted(first: int) -> None:
    """first: tokens of the answer that the prediction lacks."""
    answer = [100 + number for number in range(60)]  # which repeats nothing
    scheduler = make_speculative()
    prediction = [*answer[first:30], *range(500, 540), *answer[30:]]  # its middle is wrong
    for name, predicted in (("a", prediction), ("b", [])):
        request = make_request(name, PERIOD, max_tokens=60)
        scheduler.add_request(msgspec.structs.replace(request, prediction=predicted))
        tokens, num_steps, counts = [], 0, (0, 0)
        while scheduler.has_unfinished():
            step(scheduler, say=lambda number: answer[number - len(PERIOD)] if number < 65 else 7)
            num_steps += 1
            for output in scheduler.take_outputs():
                tokens += output.new_token_ids
                counts = output.num_predicted
        assert tokens == answer
        stats = scheduler.stats()
        if predicted:
            assert num_steps < 45
            assert counts == (stats.num_accepted_tokens, stats.num_draft_tokens - stats.num_accepted_tokens)
            assert min(counts) > 0
        else:
            assert (num_steps, counts) == (60, (0, 0))


def test_drafts_from_the_prompt_are_not_those_of_the_prediction() -> None:
    scheduler = make_speculative()
    request = make_request("a", PERIOD * 4, max_tokens=60)
    scheduler.add_request(msgspec.structs.replace(request, prediction=[*range(500, 540)]))
    outputs = []
    while scheduler.has_unfinished():
        step(scheduler)
        outputs += scheduler.take_outputs()
    accepted, rejected = outputs[-1].num_predicted
    assert accepted == 0
    assert rejected <= 8
    assert scheduler.stats().num_accepted_tokens > 30
