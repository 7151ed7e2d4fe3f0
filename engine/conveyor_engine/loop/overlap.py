"""Steps run ahead: the next one is planned while the executor still computes those before it.

Used by `core` where it is told to overlap. The executor has a thread of its own, which runs the steps in their order;
results are taken a step late. Torch-free.
"""

from collections import deque
from concurrent.futures import Executor as Pool
from concurrent.futures import Future, ThreadPoolExecutor

from conveyor_engine.loop.executor import Executor
from conveyor_engine.loop.step_runner import log_failure, recover
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
        self._begun: deque[tuple[StepPlan, Future[StepResult]]] = deque()
        self._failed = False  # set by the executor's thread, cleared when nothing is begun

    def step(self, scheduler: Scheduler, plan: StepPlan | None) -> None:
        """Begins the plan, if there is one, and tells the scheduler of the oldest step once enough are begun.

        Raises what a step of one harmless token raises, if it comes to that: then the device is broken.
        """
        if plan is not None:
            self._begun.append((plan, self._pool.submit(self._execute, plan)))
        if self._begun and (plan is None or len(self._begun) > self._num_ahead):
            self._end_oldest(scheduler)

    def _execute(self, plan: StepPlan) -> StepResult:
        if self._failed:
            raise _StepBeforeFailed
        try:
            return self._executor.execute(plan)
        except BaseException:
            self._failed = True
            raise

    def _end_oldest(self, scheduler: Scheduler) -> None:
        plan, future = self._begun.popleft()
        if future.exception() is None:
            scheduler.update(future.result())
            return
        log_failure(plan, future.exception())
        del future  # its traceback holds tensors, and the retry needs memory
        while self._begun:
            newer, never_begun = self._begun.pop()
            never_begun.exception()  # the executor is idle when the last of them has been refused
            scheduler.withdraw(newer)
        self._failed = False
        recover(scheduler, self._executor, plan)
