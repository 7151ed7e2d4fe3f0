"""Tests how the limits move: by the steps' costs and the requests' latencies, within what is possible."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from tests.engine.builders import make_facts

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Sample
from conveyor_engine.scheduling.step import Step
from conveyor_engine.tasks.embed.facts import EmbeddingFacts, PoolingParams
from conveyor_engine.wire.request import EngineRequest, FinishReason, ModelFacts, SamplingParams
from conveyor_engine.wire.step import StepPlan, StepResult
from conveyor_protocol.limit_reasons import LimitReason

Seconds = Callable[[int, int], float]  # of a step of so many rows and tokens


class Engine:
    """A core in virtual time, whose steps take as long as a function returns. It is its own executor."""

    extra_warmup_tokens = ()

    def __init__(
        self, seconds: Seconds, graph_sizes: Sequence[int] = (), mode: str = "continuous", **settings: Any
    ) -> None:
        self.graph_sizes = graph_sizes
        self.now, self.lines, self.ends = 0.0, list[str](), list[FinishReason]()
        self.limits: list[tuple[int, int]] = []
        self._seconds, self._number = seconds, 0
        task = "embed" if mode == "dynamic" else "generate"
        self.facts: ModelFacts = make_facts(
            task=task, max_model_len=512, num_kv_blocks=64 * 128 if task == "generate" else 0,
            max_num_seqs=64, max_num_batched_tokens=1024,
            of_task=EmbeddingFacts(size=8).encode() if task == "embed" else b"",
        )  # fmt: skip
        config = EngineConfig(
            model="none", batching_mode=mode, max_num_seqs=64, warmup=False, prefix_caching=False,
            max_num_queued_requests=10_000, **settings,
        )  # type: ignore[arg-type]  # fmt: skip
        self.core = EngineCore(config, self, self.lines.append, clock=lambda: self.now)
        assert self.core.steering is not None
        self.steering = self.core.steering

    def begin(self, plan: StepPlan) -> Sample:
        self.step_seconds = self._seconds(len(plan.rows), sum(plan.num_tokens))
        self.now += self.step_seconds
        if self.facts.task == "embed":
            result = StepResult(plan.number, [], payloads=[b"x"] * len(plan.rows))
        else:
            result = StepResult(plan.number, [[5]] * sum(plan.num_logits))
        return lambda _masks: lambda: result

    def free_memory(self) -> None:
        pass

    def add(self, number: int, prompt: int = 16, output: int = 64, at: float | None = None) -> None:
        for _ in range(number):
            self._number += 1
            tokens = self.facts.task == "generate"
            params = SamplingParams(max_tokens=output, ignore_eos=True) if tokens else None
            self.core.add_request(
                EngineRequest(
                    request_id=str(self._number), prompt_token_ids=[5] * prompt, params=params,
                    arrival_time=self.now if at is None else at, payload=b"" if tokens else PoolingParams().encode(),
                )
            )  # fmt: skip

    def step(self) -> None:
        self.now = max(self.now, self.core.next_wakeup(self.now) or 0.0)
        outputs = self.core.step(self.now)
        self.ends += [output.finish_reason for output in outputs if output.finish_reason is not None]
        limits = (self.steering.limits.num_rows, self.steering.limits.prompt_tokens)
        if not self.limits or self.limits[-1] != limits:
            self.limits.append(limits)

    def run(self, num_steps: int, waiting: int = 8, **lengths: int) -> None:
        """Run steps while this many requests wait."""
        for _ in range(num_steps):
            self.add(max(0, waiting - len(self.core.scheduler.waiting)), **lengths)
            self.step()

    def measure(self, num_steps: int, **lengths: int) -> Iterator[float]:
        """Return the seconds of each step."""
        for _ in range(num_steps):
            self.run(1, **lengths)
            yield self.step_seconds


def linear(rows: int, tokens: int) -> float:
    return 0.010 + 0.001 * rows + 0.0005 * (tokens - rows)


def test_the_limit_settles_where_the_objective_is_held_and_stays_there() -> None:
    engine = Engine(linear, objective_inter_token_latency_seconds=0.05)
    engine.run(600)
    settled = len(engine.limits)
    steps = sorted(engine.measure(1000))
    assert 0.8 * 0.05 <= steps[950] <= 1.05 * 0.05
    assert len(engine.limits) - settled <= 4
    assert 24 <= engine.limits[-1][0] <= 39


def test_a_move_at_most_halves_or_doubles_and_is_said() -> None:
    engine = Engine(linear, objective_inter_token_latency_seconds=0.03)
    engine.run(1000)
    assert engine.limits[0] == (64, 1024)
    for (rows, tokens), (next_rows, next_tokens) in pairwise(engine.limits):
        assert rows / 2 - 1 <= next_rows <= 2 * rows
        assert tokens // 2 <= next_tokens <= 2 * tokens
    assert engine.lines[0].startswith("event=limits_moved reason=")
    assert "rows=64->3" in engine.lines[0]


@pytest.mark.slow
def test_with_graphs_the_limits_are_their_sizes() -> None:
    """A step of 17 rows costs as much as one of 32 rows."""
    sizes = (1, 2, 4, 8, 16, 32, 48, 64)
    padded = lambda rows: next(size for size in sizes if size >= rows)  # noqa: E731
    engine = Engine(
        lambda rows, tokens: linear(padded(rows), tokens), sizes, objective_inter_token_latency_seconds=0.04
    )
    engine.run(1500)
    assert {rows for rows, _ in engine.limits} <= set(sizes)
    assert engine.limits[-1][0] in (16, 32)


@pytest.mark.slow
def test_an_objective_that_no_limits_hold_leaves_the_declared_ones_and_says_so() -> None:
    engine = Engine(lambda rows, _: 0.1 + 0.0001 * rows, objective_inter_token_latency_seconds=0.05)
    engine.run(3000)
    stats = engine.core.stats()
    assert stats.limit_moves[LimitReason.UNREACHABLE] >= 1
    declared = sum(1 for step in range(500) if engine.run(1) is None and engine.limits[-1] == (64, 1024))
    assert declared >= 350, "most of the time; now and then it tries again"
    assert any("reason=unreachable" in line for line in engine.lines)


def test_limits_that_nearly_hold_an_objective_stay() -> None:
    """The configured limits would miss it by more, because their steps take 0.56 s."""
    engine = Engine(linear, objective_inter_token_latency_seconds=0.015)
    engine.run(1000)
    assert engine.core.stats().limit_reason == LimitReason.MISSED
    assert LimitReason.UNREACHABLE not in engine.core.stats().limit_moves
    assert sorted(engine.measure(500))[475] <= 2 * 0.015


@pytest.mark.slow
def test_an_objective_that_becomes_reachable_is_held() -> None:
    slow = [0.1]
    engine = Engine(lambda rows, tokens: slow[0] + linear(rows, tokens), objective_inter_token_latency_seconds=0.05)
    engine.run(2000)
    slow[0] = 0.0
    engine.run(3000)
    assert sorted(engine.measure(500))[475] <= 1.1 * 0.05


def test_without_need_nothing_moves() -> None:
    """A step of 64 rows and 1024 prompt tokens takes 0.57 s."""
    engine = Engine(linear, objective_inter_token_latency_seconds=0.7)
    engine.run(500)
    assert engine.limits == [(64, 1024)]
    assert engine.core.stats().max_running is None, "a batch"
    assert engine.core.stats().limit_reason == LimitReason.DECLARED
    assert not engine.lines


def test_a_lower_limit_ends_nothing_that_runs_and_drops_nothing_that_waits() -> None:
    engine = Engine(linear, objective_inter_token_latency_seconds=0.02)
    engine.add(300)
    while engine.core.has_unfinished():
        engine.step()
    assert engine.limits[-1][0] <= 16
    assert engine.ends == [FinishReason.LENGTH] * 300
    assert engine.core.stats().num_preemptions == 0


def test_one_cohort_lowers_the_limit_once() -> None:
    """Rows admitted at the old limit still have its latency, so until they have ended the limit stays."""
    engine = Engine(lambda rows, _: 0.02 * rows, objective_inter_token_latency_seconds=0.5)
    engine.add(64, output=400)
    for _ in range(300):
        engine.step()
    assert len(engine.core.scheduler.running) == 64
    assert sum(engine.core.stats().limit_moves.values()) == 1


@pytest.mark.slow
def test_the_limit_rises_when_requests_become_lighter() -> None:
    engine = Engine(linear, objective_inter_token_latency_seconds=0.05)
    engine.run(800, prompt=200, output=50)
    heavy = engine.limits[-1][0]
    engine.run(3000, prompt=8, output=100)
    assert engine.limits[-1][0] >= 1.5 * heavy


def test_batches_of_one_step_hold_the_latency() -> None:
    """Each request waits for the running batch and for its own."""
    engine = Engine(linear, mode="dynamic", objective_latency_seconds=0.2, batching_window_seconds=0.01)
    engine.run(400, waiting=40, prompt=16)
    assert 2 * max(engine.measure(100, waiting=40, prompt=16)) <= 1.1 * 0.2
    assert 6 <= engine.limits[-1][0] <= 11


@pytest.mark.slow
def test_shorter_steps_bring_first_tokens_sooner() -> None:
    """A request arrives every 40 ms, and one in thirty is long. Others wait only for a part of it in each step."""
    engine = Engine(lambda rows, tokens: 0.01 + 0.0005 * tokens, objective_time_to_first_token_seconds=0.21)
    for number in range(3000):
        while engine.now < 0.04 * number and engine.core.has_unfinished():
            engine.step()
        engine.now = max(engine.now, 0.04 * number)
        engine.add(1, prompt=500 if number % 30 == 0 else 20, output=3, at=0.04 * number)
    assert engine.limits[-1][0] == 64
    assert engine.limits[-1][1] < 1024
    assert engine.core.stats().max_prompt_tokens == engine.limits[-1][1]


@pytest.mark.parametrize("waiting", [0, 8])
def test_what_it_remembers_does_not_grow(waiting: int) -> None:
    engine = Engine(linear, objective_inter_token_latency_seconds=0.05)
    engine.run(1000, waiting=waiting, output=30) if waiting else engine.add(0)
    shapes = engine.steering._cost._shapes
    assert len(shapes) <= 7 * 11
    assert all(len(shape.steps) <= 16 for shape in shapes.values())


def test_the_time_of_the_draft_model_is_not_that_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, seen = Engine(linear, objective_inter_token_latency_seconds=0.05), list[float]()
    monkeypatch.setattr(engine.steering._cost, "observe", lambda rows, tokens, seconds: seen.append(seconds))
    engine.steering.observe(Step(0, planned_at=1.0, forwards=[(1, 5, 0.5), (1, 1, 0.25)]), 3.0, 1, 0)
    assert seen == [1.25]
