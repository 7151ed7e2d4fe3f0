"""Tests the interface of executors: a recorded trace can replace a device."""

from collections.abc import Callable

import msgspec
import pytest
from tests.engine.references import Reference, add, run

from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Executor, Sample, compute
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult

GetReference = Callable[[str], Reference]


class Recorder:
    """Forwards all calls to an executor and records them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.facts = executor.facts
        self.extra_warmup_tokens = executor.extra_warmup_tokens
        self._steps: list[tuple[StepPlan, StepResult]] = []

    def begin(self, plan: StepPlan) -> Sample:
        result = compute(self._executor, plan)
        self._steps.append((plan, result))
        return lambda _: lambda: result

    def free_memory(self) -> None:
        self._executor.free_memory()

    def trace(self) -> bytes:
        return msgspec.msgpack.encode(self._steps)


class Replay:
    """Answers each plan with the recorded result, without model or device."""

    extra_warmup_tokens = 0

    def __init__(self, facts: ModelFacts, trace: bytes) -> None:
        self.facts = facts
        self._steps = iter(msgspec.msgpack.decode(trace, type=list[tuple[StepPlan, StepResult]]))

    def begin(self, plan: StepPlan) -> Sample:
        recorded, result = next(self._steps)
        assert plan == recorded
        return lambda _: lambda: result

    def free_memory(self) -> None:
        raise AssertionError("no step of a trace raises")


@pytest.mark.parametrize("mode", ["continuous", pytest.param("static", marks=pytest.mark.slow)])
def test_a_recorded_trace_gives_the_answers_of_the_device(reference: GetReference, mode: str) -> None:
    ref = reference("llama")
    config = ref.make_config(batching_mode=mode, num_kv_blocks=8)
    recorder = Recorder(ref.make_core(batching_mode=mode, num_kv_blocks=8).executor)
    device = EngineCore(config, recorder, clock=float)  # receipts have no times
    add_requests(device, ref.prompts)
    answers = run(device)
    replayed = EngineCore(config, Replay(recorder.facts, recorder.trace()), clock=float)
    add_requests(replayed, ref.prompts)
    assert run(replayed) == answers
    assert device.stats() == replayed.stats()
    assert len(answers) == len(ref.prompts)


def add_requests(core: EngineCore, prompts: list[list[int]]) -> None:
    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, temperature=number % 2, seed=number, logprobs=1)
