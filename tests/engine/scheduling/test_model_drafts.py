"""Tests when a draft model guesses tokens, for which requests, and what it reads."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from tests.engine.builders import make_request, make_scheduler
from tests.engine.pretended_constraints import SumModThree, next_token
from tests.engine.pretended_model import Generous, PretendedModel

from conveyor_engine.loop import step_runner
from conveyor_engine.loop.executor import Sample
from conveyor_engine.scheduling.model_drafts import TRIED_SHARE, ModelDrafts
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import READ_TOKENS, StepPlan, StepResult

Right = Callable[[int, int], bool]  # whether the guess at this place of the row with this number is right


@dataclass
class Device:
    """Pretends a model and a draft model whose steps take known seconds. Token n of each row is 10 + n % 500."""

    scheduler: Scheduler
    is_right: Right = lambda row, place: True
    step_seconds: float = 1.0
    token_seconds: float = 0.01  # of a further token of the model
    forward_seconds: float = 0.1  # of the draft model
    read_seconds: float = 0.001  # of a further token of the draft model
    seconds: float = 0.0
    plain_seconds: float = 0.0  # of the same steps without drafts
    num_steps: int = 0
    num_read: int = 0

    def step(self) -> StepPlan:
        """Run one step, and let the scheduler learn what it took."""
        plan = self.scheduler.schedule(0.0)
        assert plan is not None
        forwards = self._draft(plan)
        sampled = []
        drafts_of = [[]] * plan.num_decodes + plan.drafts + [[]] * len(plan.rows)
        work = zip(plan.rows, plan.num_computed_tokens, plan.num_tokens, plan.num_logits, strict=True)
        for drafts, (row, computed, number, logits) in zip(drafts_of, work, strict=False):
            first = computed + number - len(drafts)
            if logits:
                wrong = next((n for n in range(len(drafts)) if not self.is_right(row, first + n)), len(drafts))
                sampled.append([10 + place % 500 for place in range(first, first + wrong + 1)])
        open_step = self.scheduler._batch.step(plan.number)
        self.scheduler.update(StepResult(plan.number, sampled, forwards=forwards))
        seconds = self.step_seconds + self.token_seconds * open_step.num_prompt_tokens + sum(s for *_, s in forwards)
        assert self.scheduler.speculation is not None
        self.scheduler.speculation.observe(open_step, seconds)
        self.seconds, self.num_steps = self.seconds + seconds, self.num_steps + 1
        self.plain_seconds += self.step_seconds
        self.plain_seconds += self.token_seconds * (open_step.num_prompt_tokens - open_step.num_drafts)
        self.scheduler.take_outputs()
        return plan

    def _draft(self, plan: StepPlan) -> list[tuple[int, int, float]]:
        if not plan.readings:
            return []
        assert sum(number for *_, number in plan.readings) <= READ_TOKENS
        self.num_read += sum(number for *_, number in plan.readings)
        counts = [(len(plan.readings), sum(number for *_, number in plan.readings))]
        depth = max(map(len, plan.drafts), default=1)
        rows = [sum(len(drafts) > number for drafts in plan.drafts) for number in range(1, depth)]
        counts += [(number, number) for number in rows]
        return [(n, t, self.forward_seconds + self.read_seconds * (t - n)) for n, t in counts]

    def run(self) -> "Device":
        while self.scheduler.has_unfinished():
            self.step()
        return self


def make_device(num_rows: int = 1, prompt: int = 8, max_tokens: int = 400, **how: Any) -> Device:
    """Make a device with so many requests."""
    scheduler = make_scheduler(
        speculation=how.pop("speculation", "draft"),
        max_model_len=8192,
        num_kv_blocks=20_000,
        max_num_batched_tokens=1024,
        max_num_seqs=32,
        prefix_caching=how.pop("prefix_caching", True),
    )
    for name in range(num_rows):
        scheduler.add_request(make_request(str(name), [name, *range(10, 9 + prompt)], max_tokens=max_tokens))
    return Device(scheduler, **how)


@pytest.mark.parametrize("prompt", [8, 900])
@pytest.mark.parametrize("num_rows", [1, 4, 32])
@pytest.mark.parametrize("forward_seconds", [0.02, 0.2, 0.9])
def test_where_nothing_is_accepted_drafts_take_little_of_the_time(
    num_rows: int, prompt: int, forward_seconds: float
) -> None:
    device = make_device(num_rows, prompt, 2000, is_right=lambda *_: False, forward_seconds=forward_seconds).run()
    assert device.scheduler.stats().num_draft_tokens > 0
    assert device.plain_seconds > 0.98 * device.seconds


def test_where_everything_is_accepted_a_fraction_of_the_time_is_needed() -> None:
    found = [make_device(number).run() for number in (1, 8)]
    for number, device in zip((1, 8), found, strict=True):
        stats = device.scheduler.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens
        assert stats.generation_tokens == 400 * number
    assert found[0].seconds < 400 / 4
    assert found[1].seconds < 400 / 2


def test_guesses_that_are_often_wrong_are_few() -> None:
    def count(share: float) -> float:
        random = Random(5)
        device = make_device(is_right=lambda *_: random.random() < share).run()
        return device.scheduler.stats().num_draft_tokens / device.scheduler.stats().num_drafts

    assert count(0.4) < 2
    assert count(0.9) > 4


def test_a_text_that_becomes_easy_to_guess_has_drafts_again() -> None:
    device = make_device(max_tokens=6000, is_right=lambda row, place: place > 3000)
    first, drafted = 0, []
    while device.scheduler.has_unfinished():
        plan = device.step()
        drafted.append((plan.num_computed_tokens[0], sum(map(len, plan.drafts))))
    tried = [place for place, number in drafted if 1000 < place < 3000 and number]
    first = next(place for place, number in drafted if place > 3000 and number > 1)
    assert 5 < len(tried) < 2000 * TRIED_SHARE / 0.1
    assert first < 3200
    assert device.num_steps < 3200 + 2800 / 4


def test_a_draft_model_that_is_as_slow_as_the_model_is_hardly_used() -> None:
    device = make_device(max_tokens=2000, forward_seconds=1.0).run()
    assert device.seconds < 2000 / 0.98


def test_a_long_prompt_is_read_if_the_rest_of_the_answer_is_long_enough() -> None:
    """Reading takes 5 seconds, and a draft saves at most one."""
    for max_tokens, is_read in ((4, False), (400, True)):
        device = make_device(max_tokens=400).run()  # its costs are known now
        before = device.num_read
        device.read_seconds = 0.005
        device.scheduler.speculation._draft_cost.__init__(smoothing=1.0)  # type: ignore[misc, union-attr]
        for _ in range(8):
            device.scheduler.speculation._draft_cost.observe(1, 0, 0.1)  # type: ignore[union-attr]
            device.scheduler.speculation._draft_cost.observe(1, 255, 1.375)  # type: ignore[union-attr]
        device.scheduler.speculation._draft_cost.fit()  # type: ignore[union-attr]
        device.scheduler._outputs.expected_output_tokens = max_tokens
        device.scheduler.speculation._credit = 0.0  # type: ignore[union-attr]
        device.scheduler.add_request(make_request("long", [7, *range(10, 1009)], max_tokens=max_tokens))
        device.run()
        assert (device.num_read - before >= 1000) == is_read


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_draft_model_reads_a_shared_prefix_once(prefix_caching: bool) -> None:
    device = make_device(1, 200, prefix_caching=prefix_caching).run()
    before = device.num_read
    device.scheduler.add_request(make_request("again", [0, *range(10, 209)], max_tokens=400))
    device.run()
    assert (device.num_read - before < 200) == prefix_caching


def run_pretended(scheduler: Scheduler, model: PretendedModel, drafts: ModelDrafts) -> dict[str, list[int]]:
    scheduler._batch._speculation = drafts
    scheduler.on_step = lambda step, *_: drafts.observe(step, 1.0)
    tokens: dict[str, list[int]] = {}
    while scheduler.has_unfinished():
        plan = scheduler.schedule(0.0)
        if plan is not None:
            step_runner.run_step(scheduler, model, plan)
        for output in scheduler.take_outputs():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            assert output.finish_reason in (None, FinishReason.LENGTH)
    assert not model.wrong
    return tokens


@pytest.mark.parametrize("num_kv_blocks", [200, 24])
def test_the_draft_model_s_keys_are_those_of_its_rows_though_requests_are_preempted(num_kv_blocks: int) -> None:
    scheduler = make_scheduler(speculation="draft", num_kv_blocks=num_kv_blocks, max_num_seqs=4)
    prompts = {str(number): [*range(10, 30), *range(40, 40 + number)] for number in range(6)}
    for name, prompt in prompts.items():
        scheduler.add_request(make_request(name, prompt, max_tokens=25, ignore_eos=True))
    tokens = run_pretended(scheduler, PretendedModel(block_size=4), Generous(5, 4))
    for name, prompt in prompts.items():
        for token in tokens[name]:
            assert token == next_token(prompt)
            prompt.append(token)
    stats = scheduler.stats()
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    assert (stats.num_preemptions > 0) == (num_kv_blocks == 24)


@pytest.mark.parametrize("num_tokens", [5, 9])
def test_a_head_reads_no_hidden_states_of_shared_blocks_before_they_are_computed(num_tokens: int) -> None:
    scheduler = make_scheduler(speculation="draft", max_num_batched_tokens=64)
    model, drafts = PretendedModel(block_size=4), Generous(5, 4, 1)
    model.lag, scheduler._batch._speculation = 1, drafts
    for name in "ab":
        scheduler.add_request(make_request(name, range(10, 10 + num_tokens), max_tokens=20, ignore_eos=True))
    assert len(run_pretended(scheduler, model, drafts)["b"]) == 20
    assert scheduler.stats().num_drafts > 0


def test_requests_that_follow_a_grammar_have_no_drafts() -> None:
    scheduler = make_scheduler(speculation="draft", constrain=lambda _: SumModThree())
    scheduler.add_request(make_request("a", max_tokens=20, ignore_eos=True))
    run_pretended(scheduler, PretendedModel(block_size=4), Generous(5, 4))
    assert scheduler.stats().generation_tokens == 20
    assert scheduler.stats().num_drafts == 0


def test_steps_that_fail_with_drafts_are_computed_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(PretendedModel):
        num_failed = 0

        def begin(self, plan: StepPlan) -> Sample:
            if plan.readings:
                self.num_failed += 1
                if self.num_failed % 2:
                    raise RuntimeError("out of memory")
            return super().begin(plan)

    monkeypatch.setattr(step_runner._log, "disabled", True)
    scheduler, model = make_scheduler(speculation="draft"), Fails(block_size=4)
    scheduler.add_request(make_request("a", max_tokens=60, ignore_eos=True))
    tokens = run_pretended(scheduler, model, Generous(4, 4))
    assert len(tokens["a"]) == 60
    assert model.num_failed > 4
    assert scheduler.stats().num_accepted_tokens > 0


def test_a_draft_model_that_always_raises_is_asked_ever_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    failed_after: list[int] = []

    class Fails(PretendedModel):
        num_steps = 0

        def begin(self, plan: StepPlan) -> Sample:
            self.num_steps += 1
            if plan.readings:
                failed_after.append(self.num_steps)
                raise RuntimeError("the draft model's forward is broken")
            return super().begin(plan)

    monkeypatch.setattr(step_runner._log, "disabled", True)
    scheduler, model = make_scheduler(speculation="draft"), Fails(block_size=4)
    scheduler.add_request(make_request("a", max_tokens=60, ignore_eos=True))
    assert len(run_pretended(scheduler, model, ModelDrafts(4, 4))["a"]) == 60
    pauses = [later - earlier for earlier, later in pairwise(failed_after)]
    assert len(pauses) == 2
    assert pauses[0] < pauses[1]


def test_prompts_whose_reading_takes_long_are_tried_after_as_long_a_time() -> None:
    """Reading such a prompt takes more than the 10 s that other trials may save up."""
    device = make_device(1, 8, 1500, is_right=lambda *_: False, read_seconds=0.002).run()
    before, device.is_right = device.scheduler.stats().num_draft_tokens, lambda *_: True
    for number in range(8):
        device.scheduler.add_request(make_request(f"x{number}", [1000 + number, *range(10, 6009)], max_tokens=400))
        device.run()
    assert device.scheduler.stats().num_draft_tokens > before


def test_blocks_that_a_step_s_drafts_get_hold_nothing_of_their_last_request() -> None:
    scheduler = make_scheduler(speculation="draft", num_kv_blocks=64)
    drafts = Generous(5, 4)
    scheduler._batch._speculation = drafts
    drafts._held = dict.fromkeys(range(64), b"of another request")
    scheduler.add_request(make_request("a", range(10, 13), max_tokens=40, ignore_eos=True))
    model = PretendedModel(block_size=4)
    for _ in range(2):
        plan = scheduler.schedule(0.0)
        assert plan is not None
        step_runner.run_step(scheduler, model, plan)
    (request,) = scheduler.running
    assert plan.drafts
    assert len(request.block_table) == 3
    assert not drafts._held.keys() & set(request.block_table)
