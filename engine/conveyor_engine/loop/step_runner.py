"""Runs one step. If it raises, finds out whether the step was too large, a request fails, or the device is broken.

Used by `core` and `overlap`. Without torch, so that the scheduler's property tests can run failing steps.
"""

import logging
from collections.abc import Callable
from functools import partial

from conveyor_engine.loop.executor import Executor, compute
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.wire.step import StepPlan, StepResult

FAILED = "the engine could not compute this request: its step failed, and failed again alone"
_log = logging.getLogger(__name__)


def run_step(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """Compute the plan and pass the result to the scheduler. Raises the exceptions of `recover`."""
    if not conclude(scheduler, plan, lambda: _compute(scheduler, executor, plan)):
        recover(scheduler, executor, plan)


def _compute(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> StepResult:
    sample = executor.begin(plan)
    read = sample(scheduler.build_masks(plan))
    return read()


def recover(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    """Handle a step that raised. No other step may be open.

    The step is run again in two halves, and a half that fails too in its own halves. So a step that did not fit into
    memory succeeds, and a request that the model cannot compute ends alone, after as many steps of its batch as the
    batch can be halved. When a request has failed, a step of one token is run. If that raises, the device is broken,
    and the exception is raised here. If rows have states, their requests begin again instead, each alone.
    """
    executor.free_memory()
    if not scheduler.restarts:
        _run_halves(scheduler, executor, plan)
    elif scheduler.restart(plan, FAILED):
        _check_device(scheduler, executor)


def conclude(scheduler: Scheduler, plan: StepPlan, result: Callable[[], StepResult], *, is_again: bool = False) -> bool:
    """Pass the result to the scheduler.

    Returns False if the step raised, after logging the exception, with its traceback unless the step `is_again` run.

    The exception is not raised again, and its traceback is removed, because it refers to tensors whose memory the retry
    needs.
    """
    try:
        step_result = result()
    except Exception as error:  # the model, its kernels or the device may raise anything; other requests continue
        sizes = len(plan.rows), sum(plan.num_tokens)
        _log.error("event=step_failed requests=%d tokens=%d error=%r", *sizes, error, exc_info=not is_again)
        scheduler.note_raised(plan)
        error.__traceback__ = None  # breaks a cycle: the frames contain the future, which refers to the error
        return False
    scheduler.update(step_result)
    return True


def _run_halves(scheduler: Scheduler, executor: Executor, plan: StepPlan) -> None:
    for half in scheduler.halve(plan):
        if conclude(scheduler, half, partial(_compute, scheduler, executor, half), is_again=True):
            continue
        executor.free_memory()
        if len(half.rows) > 1:
            _run_halves(scheduler, executor, half)
        else:
            scheduler.fail(half, FAILED)
            _check_device(scheduler, executor)


def _check_device(scheduler: Scheduler, executor: Executor) -> None:
    """Run a step of one token, and raise what it raises."""
    with scheduler.dummy_plan() as dummy:
        compute(executor, dummy)
