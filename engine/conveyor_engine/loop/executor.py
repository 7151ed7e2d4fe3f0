"""The protocol between the loop and what runs its plans: one device, several ranks, or a recorded trace.

Called by `core`, `step_runner` and `overlap`. `execution.runners` implements it for one device. An executor gets rows
and numbers (`wire.step`), not requests, and keeps the rows' state between steps. Without torch.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

Read = Callable[[], StepResult]
"""Waits for the result of a step. Called once."""

Sample = Callable[[Sequence[RowMask]], Read]
"""Samples the tokens of a step that has begun, among those that the masks allow. Called once, before the next step."""


class Executor(Protocol):
    """Steps run one at a time, in the order in which they are begun."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model."""
        ...

    @property
    def extra_warmup_tokens(self) -> int:
        """Size of a single request that runs code which no other step runs, for warm-up; 0: none."""
        ...

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Numbers of rows of the captured steps, ascending. A step of decodes costs as much as the next larger one."""
        ...

    def begin(self, plan: StepPlan) -> Sample:
        """Passes the step's forward pass to the device, which computes it while the caller builds the masks.

        The next step may begin before this one's result is read: it finds the sampled tokens in its rows. All three
        calls raise any exception of the model, its kernels or the device. The plan's rows are then undefined.
        """
        ...

    def free_memory(self) -> None:
        """Call after a step that raised: frees cached memory. Raises if the device is broken."""
        ...


def compute(executor: Executor, plan: StepPlan) -> StepResult:
    """Computes a step without constraints, from its plan to its result."""
    sample = executor.begin(plan)
    read = sample(())
    return read()
