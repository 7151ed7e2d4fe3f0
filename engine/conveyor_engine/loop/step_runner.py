"""Runs one step. When it raises: was the step too large, does one of its requests fail, or is the device broken?

Used by `core`, and by `overlap` for steps that raised. Torch-free, so that the scheduler's property tests run steps
that fail.
"""

import logging
from collections.abc import Callable

from conveyor_engine.loop.executor import Executor, compute
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import StepPlan, StepResult

FAILED = "the engine could not compute this request: the step with it failed, and once more in a smaller batch"
_log = logging.getLogger(__name__)


def run_step(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """Computes the plan and tells the scheduler. Raises what `recover` raises."""
    if not conclude(scheduler, plan, lambda: _compute(scheduler, executor, plan)):
        recover(scheduler, executor, plan)


def _compute(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> StepResult:
    sample = executor.begin(plan)
    read = sample(scheduler.build_masks(plan))
    return read()


def recover(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """After a step that raised; no other is begun.

    It is run again in two halves: so one that did not fit into memory passes, and a request that the model cannot
    compute ends together with half of its batch at most. Raises what a step of one token raises after a half
    has failed too: then the device is broken.
    """
    executor.free_memory()
    failed = [half for half in scheduler.halve(plan) if not _run_or_fail(scheduler, executor, half)]
    if failed:
        with scheduler.dummy_plan() as dummy:
            compute(executor, dummy)


def conclude(scheduler: Scheduler, plan: StepPlan, result: Callable[[], StepResult]) -> bool:
    """Tells the scheduler the result. False if the step raised, which is logged with its traceback.

    The error goes no further, and loses its traceback: that holds tensors, and the retry needs memory.
    """
    try:
        told = result()
    except Exception as error:  # whatever a model, its kernels or the device raise: the other requests go on
        _log.exception("event=step_failed requests=%d tokens=%d", len(plan.rows), sum(plan.num_tokens))
        error.__traceback__ = None  # a future that keeps the error is in these frames too: a cycle
        return False
    scheduler.update(told)
    return True


def _run_or_fail(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> bool:
    if conclude(scheduler, plan, lambda: _compute(scheduler, executor, plan)):
        return True
    scheduler.fail(plan, FAILED)
    executor.free_memory()
    return False
