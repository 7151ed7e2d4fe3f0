"""Tests turns with systems that only count: their order and lengths, the end, and time that the host took."""

from itertools import cycle
from typing import Any

import pytest
import torch

from conveyor_bench.comparing import turns
from conveyor_bench.comparing.held import in_steps, in_steps_of_threads
from conveyor_bench.comparing.slices import Slice
from conveyor_bench.comparing.systems import Prompts, Run, Workload


class Clock:
    now = 0.0


class Counting:
    """A system that takes this many seconds for each step, and some steps for its prompts."""

    def __init__(self, clock: Clock, seconds: float, prompt_steps: int = 1) -> None:
        self.clock, self.seconds, self.prompt_steps = clock, seconds, prompt_steps

    def start(self, prompts: Prompts, output_tokens: int) -> Run:
        for tokens in [0] * (self.prompt_steps - 1) + [*range(1, output_tokens + 1)]:
            self.clock.now += self.seconds
            yield tokens
        return [[0] * output_tokens for _ in prompts]


def no_limit(tokens: int) -> Slice:
    return Slice(tokens, 0.0, 0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(turns, "processor_ticks", lambda: [0] * 8)
    return clock


def test_who_begins_says_how_far_and_the_other_follows(clock: Clock) -> None:
    systems = {"conveyor": Counting(clock, 0.25, prompt_steps=3), "peer": Counting(clock, 0.5)}
    orders = cycle([["conveyor", "peer"], ["peer", "conveyor"]])
    measured = list(turns.one_round(systems, lambda tokens: Slice(tokens, tokens / 8, 0), [[1], [2]], 9, orders))
    assert [t.phase for t in measured] == ["prefill", "decode", "decode", "decode"]
    assert [t.slices["conveyor"].tokens for t in measured] == [1, 2, 4, 2], "a second of whoever begins"
    assert [t.slices["conveyor"].seconds for t in measured] == [0.75, 0.5, 1.0, 0.5]
    assert [t.slices["peer"].seconds for t in measured] == [0.5, 1.0, 2.0, 1.0]
    assert [t.slices["limit"].seconds for t in measured] == [1 / 8, 2 / 8, 4 / 8, 2 / 8]
    assert list(measured[1].slices) == ["peer", "conveyor", "limit"], "right after the steps that it is the limit of"


def test_rounds_end_when_settled_or_with_the_budget_but_one_is_always_measured(clock: Clock) -> None:
    systems = {"conveyor": Counting(clock, 0.5), "peer": Counting(clock, 1.0)}
    workload, said = Workload(2, 3, 12), []
    assert len(turns.measure(systems, no_limit, workload, 10, 5, -1.0, said.append)) == 1
    assert said[-1] == "event=budget_spent rounds=1 of=5"
    assert len(turns.measure(systems, no_limit, workload, 10, 100, 60, said.append)) == 5, (
        "five prompts say how steady it is"
    )
    assert len(turns.measure(systems, no_limit, workload, 10, 3, 60, said.append)) == 3


def test_a_system_that_gives_fewer_tokens_is_refused(clock: Clock) -> None:
    class Short(Counting):
        def start(self, prompts: Prompts, output_tokens: int) -> Run:
            return [row[1:] for row in (yield from super().start(prompts, output_tokens))]

    with pytest.raises(AssertionError):
        list(turns.one_round({"conveyor": Short(clock, 1)}, no_limit, [[1]], 3, cycle([["conveyor"]])))


def test_the_host_takes_a_share_of_all_processors_time() -> None:
    assert turns.stolen_share([10] * 8, [11, 10, 12, 25, 10, 10, 10, 12]) == 2 / 20
    assert turns.stolen_share([10] * 8, [10] * 8) == 0
    ticks = turns.processor_ticks()
    assert len(ticks) == 8
    assert ticks[3] > 0, "idle"


def test_prompts_are_the_same_for_the_same_seed_only() -> None:
    first, again, other = (turns.random_prompts(3, (4, 2), 50, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(prompt) for prompt in first] == [4, 2, 4]


@pytest.mark.parametrize("in_steps", [in_steps, in_steps_of_threads])
def test_held_work_goes_on_only_when_asked(in_steps: Any) -> None:
    model, done = torch.nn.Identity(), []

    def work() -> str:
        for number in range(3):
            model(number)
            done.append(number)
        return "end"

    steps = in_steps(model, work)
    assert (next(steps), done) == (1, [0])
    assert (next(steps), done) == (2, [0, 1])
    assert (next(steps), done) == (3, [0, 1, 2])
    with pytest.raises(StopIteration) as stop:
        next(steps)
    assert stop.value.value == "end"


@pytest.mark.parametrize("in_steps", [in_steps, in_steps_of_threads])
def test_held_work_that_fails_says_so_and_work_nobody_asks_for_ends(in_steps: Any) -> None:
    model, done = torch.nn.Identity(), []
    with pytest.raises(ZeroDivisionError):
        list(in_steps(model, lambda: model(1) / 0))
    steps = in_steps(model, lambda: done.extend([model(1), model(2)]))
    next(steps)
    steps.close()
    assert done == [1, 2]
    assert not model._forward_pre_hooks
