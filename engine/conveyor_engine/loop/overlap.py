"""Steps run ahead: the next one is planned and begun while the device still computes those before it.

Used by `core` where it is told to overlap. The executor has a thread of its own, which begins the steps in their order
and waits for none; results are read here, a step late. So a device has its next step before this one's tokens have
come to the host. A CPU computes in that thread, and so beside what is planned here. Torch-free.
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
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

T = TypeVar("T")

NUM_AHEAD = 1  # steps begun beside the one whose result is awaited: one is enough to keep a device busy


class _StepBeforeFailed(Exception):
    """This step was not begun: its plan counts on one that raised."""


class Overlap:
    """The steps that are begun and not over."""

    def __init__(self, executor: Executor, pool: Pool | None = None, num_ahead: int = NUM_AHEAD) -> None:
        self._executor = executor
        self._pool = pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._num_ahead = num_ahead
        self._begun: deque[tuple[StepPlan, Future[Any]]] = deque()  # a Read, but a Sample before masks are there
        self._failed = False  # set by the executor's thread, cleared when nothing is begun

    def run(self, plan: StepPlan) -> StepResult:
        """A step by itself, for warm-up: a GPU's libraries keep handles and memory for each thread that calls them."""
        return _wait(self._pool.submit(self._begin_and_sample, plan))

    def step(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Begins the plan, if there is one, and tells the scheduler of the oldest step once enough are begun.

        A constrained plan samples after all steps before it are over, while the device computes its forward.
        Raises what a step of one token raises, if it comes to that: then the device is broken.
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
        """Nothing to do if it has been withdrawn because a step before it failed."""
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
        del future  # with its error: the retry needs memory
        self._withdraw_all(scheduler)
        recover(scheduler, self._executor, plan)

    def _withdraw_all(self, scheduler: Scheduler) -> None:
        """Nobody reads the steps that are begun. Each is waited for, so that the executor's thread is idle."""
        while self._begun:
            plan, future = self._begun.pop()
            future.exception()
            scheduler.withdraw(plan)
        self._failed = False


def _wait(begun: Future[Read]) -> StepResult:
    """Until it is begun, then for its result."""
    return begun.result()()
