"""Runs requests through the engine's own core with a given clock, and observes the results.

Used by `virtual`, whose executor moves a virtual clock, and by `measured`, whose clock counts processor time. The core
and its scheduler are the product's, unchanged.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Protocol

from conveyor_bench.modes.cost import Cost, StepCounts
from conveyor_bench.modes.figures import Observed
from conveyor_engine.loop.core import EngineCore
from conveyor_engine.loop.executor import Executor, Read, Sample
from conveyor_engine.wire.request import EngineRequest, ModelFacts
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult


class Clock(Protocol):
    """Counts seconds that only the measured system spends."""

    def now(self) -> float:
        """Return the seconds since the clock's start."""
        ...

    def wait_until(self, then: float) -> None:
        """Skip the time in which the system has nothing to do."""
        ...


class VirtualClock:
    """A clock that moves only when `wait_until` is called."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def wait_until(self, then: float) -> None:
        self._now = max(self._now, then)


class ProcessorClock:
    """Counts processor seconds of this process between `resume` and `pause`. Other programs do not affect it.

    With one computing thread, these are the seconds of a processor that is not shared.
    """

    def __init__(self) -> None:
        self._spent = 0.0
        self._resumed_at: float | None = None

    def now(self) -> float:
        return self._spent + (0.0 if self._resumed_at is None else time.process_time() - self._resumed_at)

    def wait_until(self, then: float) -> None:
        self._spent += max(0.0, then - self.now())

    def resume(self) -> None:
        self._resumed_at = time.process_time()

    def pause(self) -> None:
        self._spent, self._resumed_at = self.now(), None


class VirtualExecutor:
    """Computes nothing. A step advances the clock by its cost, and every row samples token 0."""

    extra_warmup_tokens = ()
    graph_sizes: Sequence[int] = ()

    def __init__(self, facts: ModelFacts, cost: Cost, clock: VirtualClock) -> None:
        self.facts = facts
        self.total = StepCounts(0, 0, 0, 0.0)  # sum over all steps
        self._cost = cost
        self._clock = clock

    def begin(self, plan: StepPlan) -> Sample:
        counts = StepCounts.of(plan)
        self.total = self.total.plus(counts)
        self._clock.wait_until(self._clock.now() + self._cost.seconds(counts))
        result = StepResult(plan.number, [[0]] * sum(plan.num_logits))
        return lambda _masks: lambda: result

    def free_memory(self) -> None:
        """Do nothing: there is no memory."""


class RecordingExecutor:
    """Wraps another executor, with other facts, and keeps the counts of its latest step."""

    def __init__(self, executor: Executor, facts: ModelFacts) -> None:
        self._executor = executor
        self.facts = facts
        self.counts: StepCounts | None = None
        self.seconds = 0.0  # processor time of all steps in the executor

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        return self._executor.extra_warmup_tokens

    @property
    def graph_sizes(self) -> Sequence[int]:
        return self._executor.graph_sizes

    def begin(self, plan: StepPlan) -> Sample:
        began = time.process_time()
        self.counts = StepCounts.of(plan)
        sample = self._executor.begin(plan)

        def sample_and_read(masks: Sequence[RowMask]) -> Read:
            result = sample(masks)()
            self.seconds += time.process_time() - began
            return lambda: result

        return sample_and_read

    def free_memory(self) -> None:
        self._executor.free_memory()


def run_requests(
    core: EngineCore, clock: Clock, requests: Sequence[EngineRequest], observed: Observed
) -> Iterator[None]:
    """Add each request when it arrives, and step until all have ended. Yields after each step.

    If all requests arrive at once, no more will come, so the last batch does not wait for the end of its window.
    """
    pending = deque(sorted(requests, key=lambda request: request.arrival_time))
    observed.begin(requests, core.facts.max_model_len)
    at_once = pending[-1].arrival_time == 0.0
    while pending or core.has_unfinished():
        while pending and pending[0].arrival_time <= clock.now():
            core.add_request(pending.popleft())
        if at_once:
            core.drain()
        now = clock.now()
        wakeup = core.next_wakeup(now)
        if wakeup is None or wakeup > now:
            arrival = [pending[0].arrival_time] if pending else []
            clock.wait_until(min(arrival + ([] if wakeup is None else [wakeup])))
            continue
        observed.before_step(core)
        outputs = core.step(now)
        observed.after_step(core, outputs, now, clock.now())
        yield
    observed.end(core, clock.now())
