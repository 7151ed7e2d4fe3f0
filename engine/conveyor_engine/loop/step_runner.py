"""Runs one step. When it raises: was the step too large, does one of its requests fail, or is the device broken?

Used by `core`, and by `overlap` for steps that raised. Torch-free, so that the scheduler's property tests run steps
that fail.
"""

import logging

from conveyor_engine.loop.executor import Executor
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import StepPlan

FAILED = "the engine could not compute this request: the step with it failed, and once more in a smaller batch"
_log = logging.getLogger(__name__)


def run_step(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """Computes the plan and tells the scheduler. Raises what `recover` raises."""
    if not _run(scheduler, executor, plan):
        recover(scheduler, executor, plan)


def recover(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """After a step that raised; no other is begun.

    It is run again in two halves: so one that did not fit into memory passes, and a request that the model cannot
    compute ends together with half of its batch at most. Raises what a step of one harmless token raises after a half
    has failed too: then the device is broken.
    """
    executor.free_memory()
    failed = [half for half in scheduler.halve(plan) if not _run_or_fail(scheduler, executor, half)]
    if failed:
        with scheduler.lend() as harmless:
            executor.execute(harmless)


def log_failure(plan: StepPlan, error: BaseException | None) -> None:
    """One line of the log, with the traceback."""
    _log.error("event=step_failed requests=%d tokens=%d", len(plan.rows), sum(plan.num_tokens), exc_info=error)


def _run(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> bool:
    """False if the step raised. The error goes no further: its traceback holds tensors, and the retry needs memory."""
    try:
        result = executor.execute(plan)
    except Exception as error:  # whatever a model, its kernels or the device raise: the other requests go on
        log_failure(plan, error)
        return False
    scheduler.update(result)
    return True


def _run_or_fail(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> bool:
    if _run(scheduler, executor, plan):
        return True
    scheduler.fail(plan, FAILED)
    executor.free_memory()
    return False
