"""Steps run ahead: the next one is planned and begun while the device still computes those before it.

Used by `core` where it is told to overlap. The executor has a thread of its own, which begins the steps in their order
and waits for none; results are read here, a step late. So a device has its next step before this one's tokens have
come to the host. A CPU computes in that thread, and so beside what is planned here. Torch-free.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from conveyor_engine.loop.executor import Executor
from conveyor_engine.loop.step_runner import conclude, recover
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import StepPlan, StepResult

NUM_AHEAD = 1  # steps begun beside the one whose result is awaited: one is enough to keep a device busy


class _StepBeforeFailed(Exception):
    """This step was not begun: its plan counts on one that raised."""


class Overlap:
    """The steps that are begun and not over."""

    def __init__(self, executor: Executor, pool: Pool | None = None, num_ahead: int = NUM_AHEAD) -> None:
        self._executor = executor
        self._pool = pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="executor")
        self._num_ahead = num_ahead
        self._begun: deque[tuple[StepPlan, Future[Callable[[], StepResult]]]] = deque()
        self._failed = False  # set by the executor's thread, cleared when nothing is begun

    def run(self, plan: StepPlan) -> StepResult:
        """A step by itself, for warm-up: a GPU's libraries keep handles and memory for each thread that calls them."""
        return _wait(self._pool.submit(self._executor.begin, plan))

    def step(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Begins the plan, if there is one, and tells the scheduler of the oldest step once enough are begun.

        Raises what a step of one token raises, if it comes to that: then the device is broken.
        """
        if plan is not None:
            self._begun.append((plan, self._pool.submit(self._begin, plan)))
        if self._begun and (plan is None or len(self._begun) > self._num_ahead):
            self._end_oldest(scheduler)

    def _begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self._failed:
            raise _StepBeforeFailed
        try:
            return self._executor.begin(plan)
        except BaseException:
            self._failed = True
            raise

    def _end_oldest(self, scheduler: Scheduler) -> None:
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


def _wait(begun: Future[Callable[[], StepResult]]) -> StepResult:
    """Until it is begun, then for its result."""
    return begun.result()()
