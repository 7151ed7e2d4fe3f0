"""The engine's core: accepts requests, runs one step at a time, and returns tokens or payloads.

Called by the engine process's loop (`process`), the benchmark and the tests. Single-threaded: calls must not overlap.
It contains no HTTP and no processes: `scheduler` decides, an `executor` computes.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import msgspec

from conveyor_engine.config.engine_config import GUESSING, EngineConfig
from conveyor_engine.errors import ErrorCode, InvalidRequest, ModelError, is_out_of_memory
from conveyor_engine.loop.adapters import Adapters
from conveyor_engine.loop.executor import Executor, TakesAdapters, compute
from conveyor_engine.loop.overlap import Overlap
from conveyor_engine.loop.step_runner import run_step
from conveyor_engine.masks.grammars import Grammars
from conveyor_engine.objectives.candidates import Objectives
from conveyor_engine.objectives.steering import Steering
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import Task, build_task
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, EngineStats, ModelFacts, RequestOutput
from conveyor_engine.wire.step import READ_TOKENS, StepResult
from conveyor_protocol.failure_reasons import FailureReason


def _silent(_: str) -> None:
    pass


def _call(work: Callable[[], Any]) -> Any:
    return work()


class EngineCore:
    """Connects one scheduler with one executor."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        progress: Callable[[str], None] = _silent,
        tokenizer: Tokenizer | None = None,
        overlap: bool = False,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        """Warm up the executor. Raises ModelError, whose `reason` becomes part of the termination message.

        Raises ValueError for speculation with `overlap`: drafts need the tokens of the last step.

        progress: called with key=value lines about the warm-up and changed limits. overlap: plan steps ahead.
        clock: the clock that `now` of `step` comes from. It measures the steps.
        grammars: builds the constraints on requests' tokens; None: requests have none.
        wake: called in another thread when `adapters` has something to do.
        tokenizer: finds stop strings; None: the caller must find them in the outputs.
        """
        if overlap and config.speculation is not None:
            raise ValueError("speculation needs `overlap=False`: drafts need the tokens of the last step")
        self.executor = executor
        self.facts: ModelFacts = executor.facts
        objectives = Objectives.of(config)
        self.steering: Steering | None = None
        if objectives is not None:
            self.steering = Steering(objectives, config, self.facts, executor.graph_sizes, progress)
        limits = None if self.steering is None else self.steering.limits
        self.grammars = grammars
        constrain, masks = (None, None) if grammars is None else (grammars.constrain, grammars.masks)
        slots = AdapterSlots(config.adapter_slots, len(config.adapters)) if config.adapters_file else None
        self.scheduler = Scheduler(
            config, self.facts, tokenizer, constrain, limits=limits, masks=masks, slots=slots, clock=clock
        )
        self._observe_steps(clock)
        self._overlap = Overlap(executor) if overlap else None
        of_adapters = cast(TakesAdapters, executor), self.scheduler, build_task(self.facts), len(config.adapters)
        self.adapters = Adapters(*of_adapters, _call if self._overlap is None else self._overlap.call, wake)
        self.longest_warmup_step_seconds = self.warmup_seconds = 0.0
        if config.warmup:
            started = time.monotonic()
            self._warm_up(config)
            self.warmup_seconds = time.monotonic() - started
            progress(f"event=warmed_up seconds={self.warmup_seconds:.1f}")

    def _observe_steps(self, clock: Callable[[], float]) -> None:
        """Pass each step to whatever learns what steps cost."""
        observers = [each.observe for each in (self.steering, self.scheduler.speculation) if each is not None]

        def observe(step: Step, num_running: int, num_waiting: int) -> None:
            ended = clock()
            for each in observers:
                each(step, ended, num_running, num_waiting)

        if observers:
            self.scheduler.on_step = observe

    def add_request(self, request: EngineRequest) -> None:
        """Add the request to the waiting queue. If it raises Overloaded or InvalidRequest, the request is not added."""
        if not self.adapters.has(request.adapter):
            raise InvalidRequest("this engine no longer serves the adapter", code=ErrorCode.MODEL_NOT_FOUND)
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        """End the request and free its blocks. The next `step` returns its last output. Unknown ids are ignored."""
        self.scheduler.abort(request_id)

    def drain(self) -> None:
        """From now on, start batches without waiting for more requests. Called when no more requests will arrive.

        The engine is drained when `has_unfinished` is False.
        """
        self.scheduler.drain()

    def step(self, now: float) -> list[RequestOutput]:
        """Schedule and run a step. Returns the new outputs, which may come from an earlier step.

        now: time.monotonic() seconds. If nothing is due, it returns immediately, possibly with outputs of aborted
        requests. A failed step ends only requests of its batch. If this method raises, the engine is broken.
        """
        plan = self.scheduler.schedule(now)
        if self._overlap is not None:
            self._overlap.step(self.scheduler, plan)
        elif plan is not None:
            run_step(self.scheduler, self.executor, plan)
        return self.adapters.take_trial(self.scheduler.take_outputs())

    def notice_masks(self) -> None:
        """Called when a mask may be ready for which all rows wait."""
        self.scheduler.look_again()

    def has_unfinished(self) -> bool:
        """Return whether any request has not had its last output yet, or a step is open."""
        return self.scheduler.has_unfinished()

    def next_wakeup(self, now: float) -> float | None:
        """Return when `step` next has work if no request is added or aborted: `now` for immediately, None for never."""
        return self.scheduler.next_wakeup(now)

    def stats(self) -> EngineStats:
        """Return the current gauges and counters."""
        stats = self.scheduler.stats()
        return stats if self.steering is None else self.steering.report(stats)

    def _warm_up(self, config: EngineConfig) -> None:
        """Run steps of the largest size and of the declared workload.

        So no request waits for first-time allocations, page faults and compilation. Raises ModelError if no row has a
        finite result, because such an engine could not answer any request.
        """
        facts = self.facts
        settings = replace(
            config,
            batching_mode="continuous",
            padding=None,
            max_num_queued_requests=sys.maxsize,
            prefix_caching=False,  # dummies with the same number have the same prefix
            speculation=None,
        )
        scheduler = Scheduler(settings, facts)
        task = build_task(facts)
        cost = min(task.dummy_cost_max, max(1, facts.max_num_batched_tokens // facts.max_num_seqs))
        self._run_dummies(scheduler, task, facts.max_num_seqs, cost)
        for tokens in self.executor.extra_warmup_tokens:
            self._run_dummies(scheduler, task, 1, min(task.dummy_cost_max, tokens))
        for adapter, (name, _) in enumerate(config.adapters, start=1):
            self._run_dummies(scheduler, task, 1, cost, adapter, f"with the adapter {name!r}, ")
        if config.workload is not None:
            for number, tokens in config.workload.list_warm_up(facts.max_num_seqs, facts.max_num_batched_tokens):
                self._run_dummies(scheduler, task, number, min(task.dummy_cost_max, tokens))
        if config.speculation in GUESSING:
            what = "`draft_model`" if config.speculation == "draft" else "the model's head"
            self._warm_up_draft(Scheduler(replace(settings, speculation=config.speculation), facts), task, what)

    def _run_dummies(
        self, scheduler: Scheduler, task: Task, num_requests: int, cost: int, adapter: int = 0, where: str = ""
    ) -> None:
        """Run this number of dummy requests, each with this cost and adapter. where: for errors."""
        for number in range(num_requests):
            scheduler.add_request(msgspec.structs.replace(task.build_dummy(number, cost), adapter=adapter))
        self._run_all(scheduler, task, where)

    def _warm_up_draft(self, scheduler: Scheduler, task: Task, what: str) -> None:
        """Let the draft model, or the head, read a step's most tokens and guess one. Raises ModelError if it raises.

        what: its name in the error.
        """
        facts = self.facts
        cost = max(1, min(READ_TOKENS, facts.max_num_batched_tokens, facts.max_model_len - 1) - 2)
        dummy = task.build_dummy(0, cost)
        assert dummy.params is not None
        params = msgspec.structs.replace(dummy.params, max_tokens=min(3, facts.max_model_len - cost))
        scheduler.add_request(msgspec.structs.replace(dummy, params=params))
        try:
            self._run_all(scheduler, task, "")
        except Exception as error:  # the draft model or its kernels may raise anything
            reason = FailureReason.OUT_OF_MEMORY if is_out_of_memory(error) else FailureReason.UNSUPPORTED_MODEL
            why = f"{type(error).__name__}: {error}"
            raise ModelError(f"{what} cannot be computed: {why}", reason=reason) from error

    def _run_all(self, scheduler: Scheduler, task: Task, where: str) -> None:
        while scheduler.requests:
            started = time.monotonic()
            plan = scheduler.schedule(0.0)
            assert plan is not None
            result = compute(self.executor, plan) if self._overlap is None else self._overlap.run(plan)
            self.longest_warmup_step_seconds = max(self.longest_warmup_step_seconds, time.monotonic() - started)
            if _is_nowhere_finite(result):
                raise ModelError(where + _not_finite(task.result_name, self.facts.dtype))
            scheduler.update(result)


def _is_nowhere_finite(result: StepResult) -> bool:
    if result.payloads is not None and not result.token_ids:
        return not any(result.payloads)
    return bool(result.token_ids) and max(map(max, result.token_ids)) < 0


def _not_finite(what: str, dtype: str) -> str:
    advice = "the weights are damaged" if dtype == "float32" else "set `dtype: float32`, or repair the weights"
    return f"computed in {dtype}, the model's {what} are not finite (NaN or infinity) for any prompt: {advice}"
