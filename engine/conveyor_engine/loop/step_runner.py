"""Runs one step. When it raises: was the step too large, is one of its requests to blame, or is the device broken?

Used by `core`. Torch-free, so that the scheduler's property tests run steps that fail.
"""

import logging

from conveyor_engine.loop.executor import Executor
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import StepPlan

FAILED = "the engine could not compute this request: the step with it failed, and once more in a smaller batch"
_log = logging.getLogger(__name__)


def run_step(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """Computes the plan and tells the scheduler.

    A step that raises is run again in two halves: so one that did not fit into memory passes, and a request that the
    model cannot compute ends together with half of its batch at most. Raises what a step of one harmless token raises
    after a half has failed too: then the device is broken.
    """
    if _run(scheduler, executor, plan):
        return
    executor.free_memory()
    failed = [half for half in scheduler.halve(plan) if not _run_or_fail(scheduler, executor, half)]
    if failed:
        with scheduler.lend() as harmless:
            executor.execute(harmless)


def _run(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> bool:
    """False if the step raised. The error goes no further: its traceback holds tensors, and the retry needs memory."""
    try:
        result = executor.execute(plan)
    except Exception:  # whatever a model, its kernels or the device raise: those who are not to blame go on
        _log.exception("event=step_failed requests=%d tokens=%d", len(plan.rows), sum(plan.num_tokens))
        return False
    scheduler.update(result)
    return True


def _run_or_fail(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> bool:
    if _run(scheduler, executor, plan):
        return True
    scheduler.fail(plan, FAILED)
    executor.free_memory()
    return False
