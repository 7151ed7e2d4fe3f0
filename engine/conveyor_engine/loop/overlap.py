"""Runs steps ahead: the next step is planned and begun while the device still computes the previous one.

Used by `core` if `overlap` is set, which `process` does for GPUs. The executor has a separate thread, which begins the
steps in order and does not wait for their results. This module reads the results, one step late. So a GPU has its next
step before this step's tokens are on the host. Does not import torch.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from conveyor_engine.loop.executor import Executor, Read, Sample
from conveyor_engine.loop.step_runner import conclude, recover
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import NUM_AHEAD, RowMask, StepPlan, StepResult

T = TypeVar("T")


class _StepBeforeFailed(Exception):
    """This step was not begun, because its plan depends on a step that raised."""


class Overlap:
    """The steps that have begun and are not over."""

    def __init__(self, executor: Executor, pool: Pool | None = None, num_ahead: int = NUM_AHEAD) -> None:
        self._executor = executor
        self._pool = pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._num_ahead = num_ahead
        # The result of a future is a Read, or a Sample until the step's masks are built.
        self._begun: deque[tuple[StepPlan, Future[Any]]] = deque()
        self._failed = False  # set by the executor's thread; cleared when no step is open

    def run(self, plan: StepPlan) -> StepResult:
        """Run a single step in the executor's thread, for warm-up.

        A GPU's libraries keep handles and memory for each thread that calls them, so the warm-up must use the same
        thread.
        """
        return _wait(self._pool.submit(self._begin_and_sample, plan))

    def call(self, work: Callable[[], T]) -> T:
        """Call this in the executor's thread, after all open steps have begun, and return the result."""
        return self._pool.submit(work).result()

    def step(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Begin the plan. Then pass the oldest results to the scheduler until at most `num_ahead` steps are open.

        Without a plan, pass the oldest result, if a step is open.

        The masks of a constrained plan need the tokens of all earlier steps. So the plan's tokens are sampled only
        after these steps are over. Meanwhile the device computes the plan's forward pass. Raises an exception if the
        device is broken: see `recover`.
        """
        if plan is None:
            self._end_oldest(scheduler)
            return
        is_constrained = scheduler.is_constrained(plan)
        self._begun.append((plan, self._pool.submit(self._begin if is_constrained else self._begin_and_sample, plan)))
        if is_constrained:
            self._end_all_but(1, scheduler)
            self._sample_newest(scheduler)
        self._end_all_but(self._num_ahead, scheduler)

    def _begin(self, plan: StepPlan) -> Sample:
        return self._unless_failed(lambda: self._executor.begin(plan))

    def _begin_and_sample(self, plan: StepPlan) -> Read:
        return self._unless_failed(lambda: self._executor.begin(plan)(()))

    def _sample(self, begun: Future[Sample], masks: Sequence[RowMask]) -> Read:
        sample = begun.result()
        return self._unless_failed(lambda: sample(masks))

    def _unless_failed(self, call: Callable[[], T]) -> T:
        if self._failed:
            raise _StepBeforeFailed
        try:
            return call()
        except BaseException:
            self._failed = True
            raise

    def _sample_newest(self, scheduler: Scheduler) -> None:
        """Sample the newest step. Does nothing if it was withdrawn because an earlier step failed."""
        if self._begun:
            plan, begun = self._begun.pop()
            self._begun.append((plan, self._pool.submit(self._sample, begun, scheduler.build_masks(plan))))

    def _end_all_but(self, number: int, scheduler: Scheduler) -> None:
        while len(self._begun) > number:
            self._end_oldest(scheduler)

    def _end_oldest(self, scheduler: Scheduler) -> None:
        if not self._begun:
            return
        plan, future = self._begun.popleft()
        if conclude(scheduler, plan, partial(_wait, future)):
            return
        del future  # frees its error, because the retry needs memory
        self._withdraw_all(scheduler)
        recover(scheduler, self._executor, plan)

    def _withdraw_all(self, scheduler: Scheduler) -> None:
        """Withdraw all open steps. Waits for each, so that the executor's thread is idle afterwards."""
        while self._begun:
            plan, future = self._begun.pop()
            future.exception()
            scheduler.withdraw(plan)
        self._failed = False


def _wait(begun: Future[Read]) -> StepResult:
    """Wait until the step has begun, then for its result."""
    return begun.result()()
