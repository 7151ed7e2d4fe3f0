"""The engine on one screen: requests in, one step at a time, tokens or payloads out.

Driven by the engine process's loop (`process`), the benchmark and the tests. Single-threaded: no call
may overlap another. Knows neither HTTP nor processes; `scheduler` decides, an `executor` computes.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import ModelError
from conveyor_engine.loop.executor import Executor, compute
from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.loop.step_runner import run_step
from conveyor_engine.objectives.candidates import Objectives
from conveyor_engine.objectives.steering import Steering
from conveyor_engine.scheduling.request_state import Constraint
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.tasks import Task, build_task
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, EngineStats, ModelFacts, RequestOutput
from conveyor_engine.wire.step import StepResult


def _silent(_: str) -> None:
    pass


class EngineCore:
    """One executor, one scheduler."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        progress: Callable[[str], None] = _silent,
        tokenizer: Tokenizer | None = None,
        overlap: bool = False,
        constrain: Callable[[EngineRequest], Constraint | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Warms the executor up; `progress` gets a key=value line about it. `overlap` runs steps ahead.

        `clock` is that of `step`: it times steps where there are objectives. `constrain` returns what limits a
        request's tokens, or raises InvalidRequest.
        Without the tokenizer, stop strings are left to whoever reads the answers. Raises ModelError, whose `reason`
        goes into the termination message.
        """
        self.executor = executor
        self.facts: ModelFacts = executor.facts
        objectives = Objectives.of(config)
        self.steering: Steering | None = None
        if objectives is not None:
            self.steering = Steering(objectives, config, self.facts, executor.graph_sizes, progress)
        limits = None if self.steering is None else self.steering.limits
        self.scheduler = Scheduler(config, self.facts, tokenizer, constrain, limits=limits)
        if (steering := self.steering) is not None:
            self.scheduler.on_step = lambda step, *counts: steering.observe(step, clock(), *counts)
        self._overlap = Overlap(executor) if overlap else None
        self.longest_warmup_step_seconds = self.warmup_seconds = 0.0
        if config.warmup:
            started = time.monotonic()
            self._warm_up(config)
            self.warmup_seconds = time.monotonic() - started
            progress(f"event=warmed_up seconds={self.warmup_seconds:.1f}")

    def add_request(self, request: EngineRequest) -> None:
        """Puts the request into the waiting queue. Raises Overloaded or InvalidRequest; then it never was."""
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """Ends the request now and frees its blocks; the next `step` gives its last output. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def drain(self) -> None:
        """No more requests will come: batches start at once with what waits. `has_unfinished` says when it is over."""
        self.scheduler.drain()

    def step(self, now: float) -> list[RequestOutput]:
        """Schedules, runs a step, and returns what became known for each request: of that step, or of one before.

        `now` is time.monotonic() seconds. With nothing due it returns at once, perhaps with aborted requests' outputs.
        A step that fails ends requests of its batch; what is raised here says that the engine is broken.
        """
        plan = self.scheduler.schedule(now)
        if self._overlap is not None:
            self._overlap.step(self.scheduler, plan)
        elif plan is not None:
            run_step(self.scheduler, self.executor, plan)
        return self.scheduler.take_outputs()

    def has_unfinished(self) -> bool:
        """Whether some request has not had its last output yet."""
        return self.scheduler.has_unfinished()

    def next_wakeup(self, now: float) -> float | None:
        """When `step` will next have work if nobody adds or aborts: `now` = at once, None = never."""
        return self.scheduler.next_wakeup(now)

    def stats(self) -> EngineStats:
        """Gauges and counters as of now."""
        stats = self.scheduler.stats()
        return stats if self.steering is None else self.steering.report(stats)

    def _warm_up(self, config: EngineConfig) -> None:
        """Runs steps of the largest size and of the workload, so that no request pays for first-time allocations, page
        faults and compilation.

        Raises ModelError if nothing of what the rows get is finite: such an engine could answer nobody.
        """
        facts = self.facts
        scheduler = Scheduler(
            replace(
                config,
                batching_mode="continuous",
                padding=None,
                max_num_queued_requests=sys.maxsize,
                prefix_caching=False,  # dummies of one number begin alike
            ),
            facts,
        )
        task = build_task(facts)
        cost = min(task.dummy_cost_max, max(1, facts.max_num_batched_tokens // facts.max_num_seqs))
        self._run_dummies(scheduler, task, facts.max_num_seqs, cost)
        if extra_warmup_tokens := self.executor.extra_warmup_tokens:
            self._run_dummies(scheduler, task, 1, min(task.dummy_cost_max, extra_warmup_tokens))
        if config.workload is not None:
            for number, tokens in config.workload.list_warm_up(facts.max_num_seqs, facts.max_num_batched_tokens):
                self._run_dummies(scheduler, task, number, min(task.dummy_cost_max, tokens))

    def _run_dummies(self, scheduler: Scheduler, task: Task, num_requests: int, cost: int) -> None:
        """Requests that each cost as much as a prompt of so many tokens."""
        for number in range(num_requests):
            scheduler.add_request(task.build_dummy(number, cost))
        while scheduler.requests:
            started = time.monotonic()
            plan = scheduler.schedule(0.0)
            assert plan is not None
            result = compute(self.executor, plan) if self._overlap is None else self._overlap.run(plan)
            self.longest_warmup_step_seconds = max(self.longest_warmup_step_seconds, time.monotonic() - started)
            if _is_nowhere_finite(result):
                raise ModelError(_not_finite(task.result_name, self.facts.dtype))
            scheduler.update(result)


def _is_nowhere_finite(result: StepResult) -> bool:
    if result.payloads is not None:
        return not any(result.payloads)
    return bool(result.token_ids) and max(map(max, result.token_ids)) < 0


def _not_finite(what: str, dtype: str) -> str:
    advice = "the weights are damaged" if dtype == "float32" else "set `dtype: float32`, or mend the weights"
    return f"computed in {dtype}, the model's {what} are not finite (NaN or infinity) for any prompt: {advice}"
