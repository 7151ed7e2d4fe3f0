"""Tests overlapping steps: they give the same tokens as steps in turn, and unfinished steps are handled."""

import gc
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakSet

import pytest
from tests.engine.builders import make_facts, make_request, result_of
from tests.engine.executors import AtOnce, FailsLate
from tests.engine.loop.test_plain_steps import MODES, request_everything, run_out_of_memory
from tests.engine.pretended_model import PretendedModel
from tests.engine.references import MAX_TOKENS, Reference, add, run, tokens_of

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.execution import build
from conveyor_engine.loop import process, step_runner
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Executor, Read, Sample
from conveyor_engine.loop.process import Disconnected, EngineLoop
from conveyor_engine.wire.messages import Add, StepOutputs
from conveyor_engine.wire.request import FinishReason
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

GetReference = Callable[[str], Reference]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: "-".join(mode.values()))
@pytest.mark.parametrize("num_kv_blocks", [64, pytest.param(8, marks=pytest.mark.slow)])
def test_steps_that_run_ahead_give_the_same_answers(
    reference: GetReference, mode: dict[str, Any], num_kv_blocks: int
) -> None:
    ref = reference("llama")
    answers = []
    for overlap in (True, False):
        core = ref.make_core(overlap=overlap, num_kv_blocks=num_kv_blocks, max_num_batched_tokens=200, **mode)
        core.scheduler._outputs.expected_output_tokens = 1.0
        request_everything(core, ref.prompts)
        outputs = run(core)
        assert [tokens_of(outputs["0"])] == ref.answers[:1]
        answers.append({name: (tokens_of(output), output[-1].finish_reason) for name, output in outputs.items()})
        assert core.stats().kv_cache_usage == 0.0
    assert answers[0] == answers[1]


class Waits:
    """An executor that ends steps only when `may_end` is set."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.facts, self.extra_warmup_tokens = executor.facts, executor.extra_warmup_tokens
        self.free_memory = executor.free_memory
        self.may_end = threading.Event()

    def begin(self, plan: StepPlan) -> Sample:
        assert self.may_end.wait(60)
        return self._executor.begin(plan)


def make_waiting(ref: Reference) -> tuple[EngineCore, Waits]:
    waits = Waits(ref.make_core().executor)
    return EngineCore(ref.make_config(), waits, overlap=True), waits


def test_the_next_step_is_planned_while_the_executor_computes(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = reference("llama")
    core, waits = make_waiting(ref)
    schedule, plans = core.scheduler.schedule, []

    def count(now: float) -> StepPlan | None:
        plans.append(schedule(now))
        if len(plans) == 2:
            waits.may_end.set()
        return plans[-1]

    monkeypatch.setattr(core.scheduler, "schedule", count)
    add(core, "a", ref.prompts[0])
    assert tokens_of(run(core)["a"]) == ref.answers[0]
    assert None not in plans[:2]


class ReadLate:
    """An executor whose results, except the last one, can be read only after the next step has begun."""

    def __init__(self, executor: Executor, num_steps: int) -> None:
        self._executor = executor
        self.facts, self.extra_warmup_tokens = executor.facts, executor.extra_warmup_tokens
        self.free_memory = executor.free_memory
        self._begun = [threading.Event() for _ in range(num_steps)]

    def begin(self, plan: StepPlan) -> Sample:
        sample = self._executor.begin(plan)
        self._begun[plan.number].set()

        def sample_now(masks: Sequence[RowMask]) -> Read:
            read = sample(masks)

            def read_late() -> StepResult:
                assert all(event.wait(60) for event in self._begun[: plan.number + 2])
                return read()

            return read_late

        return sample_now


def test_a_steps_inputs_are_built_before_the_tokens_of_the_step_before_are_read(reference: GetReference) -> None:
    ref = reference("llama")
    core = EngineCore(ref.make_config(), ReadLate(ref.make_core().executor, num_steps=MAX_TOKENS), overlap=True)
    add(core, "a", ref.prompts[0])
    assert tokens_of(run(core)["a"]) == ref.answers[0]


def test_the_engine_process_gives_every_answer_when_steps_run_ahead(reference: GetReference) -> None:
    ref = reference("llama")
    core = ref.make_core(overlap=True)
    requests = [
        make_request(str(n), prompt, max_tokens=MAX_TOKENS, temperature=0.0) for n, prompt in enumerate(ref.prompts)
    ]

    class Channel:
        """A channel on which requests arrive one by one. The other side disconnects when all are answered."""

        def __init__(self) -> None:
            self.received: dict[str, list[int]] = {request.request_id: [] for request in requests}
            self._waiting = list(requests)

        def receive(self, timeout_seconds: float | None) -> list[Add]:
            if not self._waiting and not core.has_unfinished():
                raise Disconnected
            return [Add.of([self._waiting.pop(0)])] if self._waiting else []

        def send(self, message: StepOutputs) -> None:
            for output in message.outputs:
                self.received[output.request_id] += output.new_token_ids

    channel: Any = Channel()
    pulse: Any = nullcontext()
    with pytest.raises(Disconnected):
        EngineLoop(core, channel, pulse).run()
    assert list(channel.received.values()) == ref.answers


@pytest.mark.parametrize(("device", "runs_ahead"), [("cpu", False), ("cuda", True)])
def test_steps_run_ahead_where_the_device_works_beside_the_host(
    monkeypatch: pytest.MonkeyPatch, device: str, runs_ahead: bool
) -> None:
    class Counts:
        """Counts the maximum number of steps that were begun and not read."""

        facts, extra_warmup_tokens = make_facts(device=device), ()
        num_open = most = 0

        def begin(self, plan: StepPlan) -> Sample:
            self.num_open += 1
            self.most = max(self.most, self.num_open)
            return lambda _: lambda: self._read(plan)

        def _read(self, plan: StepPlan) -> StepResult:
            self.num_open -= 1
            return result_of(plan)

    runner = Counts()
    monkeypatch.setattr(build, "build_runner", lambda *_: runner)
    channel: Any = SimpleNamespace(wake=None)
    monkeypatch.setattr("conveyor_engine.loop.overlap.ThreadPoolExecutor", lambda **_: AtOnce())
    core = process._load(EngineConfig(model="none", warmup=False), channel)
    core.add_request(make_request("a"))
    run(core)
    assert runner.most == 1 + runs_ahead


def test_the_thread_that_begins_steps_is_the_one_that_is_warmed_up() -> None:
    class Notes(PretendedModel):
        facts, extra_warmup_tokens = make_facts(), ()
        threads: ClassVar[set[threading.Thread]] = set()

        def begin(self, plan: StepPlan) -> Sample:
            self.threads.add(threading.current_thread())
            return super().begin(plan)

    core = EngineCore(EngineConfig(model="none"), Notes(4), overlap=True)
    assert Notes.threads
    core.add_request(make_request("a"))
    run(core)
    assert len(Notes.threads) == 1
    assert threading.main_thread() not in Notes.threads


def test_an_abort_while_a_step_runs_frees_everything_at_once_and_disturbs_nobody(reference: GetReference) -> None:
    ref = reference("llama")
    core, waits = make_waiting(ref)
    add(core, "gone", ref.prompts[0])
    assert core.step(0.0) == []
    core.abort("gone")
    assert core.stats().kv_cache_usage == 0.0
    add(core, "next", ref.prompts[1])
    waits.may_end.set()
    outputs = run(core)
    assert [output.finish_reason for output in outputs["gone"]] == [FinishReason.ABORT]
    assert tokens_of(outputs["next"]) == ref.answers[1]


def test_a_drain_while_a_step_runs_ends_when_the_last_answer_does(reference: GetReference) -> None:
    ref = reference("llama")
    core, waits = make_waiting(ref)
    add(core, "a", ref.prompts[0])
    assert core.step(0.0) == []
    core.drain()
    assert core.has_unfinished()
    waits.may_end.set()
    assert tokens_of(run(core)["a"]) == ref.answers[0]


@pytest.mark.parametrize("mode", MODES[1:], ids=lambda mode: "-".join(mode.values()))
def test_a_step_that_fails_while_the_next_is_begun_ends_as_many_as_in_turn(
    reference: GetReference, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    ref = reference("llama")
    ends = []
    for overlap in (True, False):
        core = ref.make_core(overlap=overlap, max_num_batched_tokens=512, max_num_seqs=8, **mode)
        run_out_of_memory(core, monkeypatch, largest=150)
        add(core, "bad", [198] * 3)
        request_everything(core, ref.prompts)
        outputs = run(core)
        assert outputs["bad"][-1].finish_reason == FinishReason.ERROR
        assert FinishReason.LENGTH in {output[-1].finish_reason for output in outputs.values()}
        assert core.stats().kv_cache_usage == 0.0
        ends.append({name: (tokens_of(output), output[-1].finish_reason) for name, output in outputs.items()})
    assert ends[0] == ends[1]


@pytest.mark.parametrize("late", [False, True])
def test_a_device_that_breaks_while_the_next_step_is_begun_ends_the_engine(reference: GetReference, late: bool) -> None:
    class Breaks(Waits):
        def begin(self, plan: StepPlan) -> Sample:
            if plan.number > 1:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            return super().begin(plan)

    ref = reference("llama")
    broken = Breaks(ref.make_core().executor)
    broken.may_end.set()
    core = EngineCore(ref.make_config(), FailsLate(broken) if late else broken, overlap=True)
    add(core, "a", ref.prompts[0])
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(core)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_what_a_failed_step_held_is_free_when_its_requests_are_tried_again(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, late: bool
) -> None:
    monkeypatch.setattr(step_runner._log, "disabled", True)  # pytest keeps what is logged, tracebacks included

    class Activations:
        """Objects that only a garbage collection could free if they were in a cycle."""

    class TooLarge(PretendedModel):
        facts, extra_warmup_tokens = make_facts(), ()
        held: ClassVar[WeakSet[Activations]] = WeakSet()
        num_failed = 0

        def begin(self, plan: StepPlan) -> Sample:
            assert not self.held
            if plan.number != 1:
                return super().begin(plan)
            activations = Activations()
            self.held.add(activations)
            self.num_failed += 1
            if not late:
                raise MemoryError

            def read() -> StepResult:
                raise MemoryError(activations)

            return lambda _: read

    model = TooLarge(4)
    core = EngineCore(EngineConfig(model="none", warmup=False), model, overlap=overlap)
    core.add_request(make_request("a"))
    gc.disable()
    try:
        outputs = run(core)["a"]
    finally:
        gc.enable()
    assert (outputs[-1].finish_reason, model.num_failed) == (FinishReason.LENGTH, 1)
