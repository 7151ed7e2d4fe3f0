"""Runs one step. When it raises: was the step too large, is one of its requests to blame, or is the device broken?

Used by `core`. Torch-free, so that the scheduler's property tests run steps that fail.
"""

import logging
from typing import Protocol

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.scheduler import Scheduler
from conveyor_engine.scheduling.step import Sampled, StepPlan
from conveyor_engine.wire.request import EngineRequest, SamplingParams

FAILED = "the engine could not compute this request: the step with it failed, and once more in a smaller batch"
_log = logging.getLogger(__name__)


class Runner(Protocol):
    """`ModelRunner`, as far as it is needed here."""

    def execute(self, plan: StepPlan) -> Sampled: ...

    def free_memory(self) -> None: ...


def run_step(scheduler: Scheduler, runner: Runner, plan: StepPlan) -> None:
    """Computes the plan and tells the scheduler.

    A step that raises is run again in two halves: so one that did not fit into memory passes, and a request that the
    model cannot compute ends together with half of its batch at most. Raises what a step of one harmless token raises
    after a half has failed too: then the device is broken.
    """
    if _run(scheduler, runner, plan):
        return
    runner.free_memory()
    failed = [half for half in plan.halves() if not _run_or_fail(scheduler, runner, half)]
    if failed:
        _try_device(scheduler, runner)


def _run(scheduler: Scheduler, runner: Runner, plan: StepPlan) -> bool:
    """False if the step raised. The error goes no further: its traceback holds tensors, and the retry needs memory."""
    try:
        sampled = runner.execute(plan)
    except Exception:  # whatever a model, its kernels or the device raise: those who are not to blame go on
        _log.exception("event=step_failed requests=%d tokens=%d", len(plan.work()), plan.num_tokens)
        return False
    scheduler.update(plan, sampled)
    return True


def _run_or_fail(scheduler: Scheduler, runner: Runner, plan: StepPlan) -> bool:
    if _run(scheduler, runner, plan):
        return True
    scheduler.fail(plan, FAILED)
    runner.free_memory()
    return False


def _try_device(scheduler: Scheduler, runner: Runner) -> None:
    """One token of a request that nobody waits for."""
    params = SamplingParams(max_tokens=1, temperature=0.0)
    request = RequestState(EngineRequest(request_id="try", prompt_token_ids=[0], sampling_params=params), ())
    with scheduler.lend(request):
        runner.execute(StepPlan(decodes=[request], num_tokens=1))
