"""What runs the plans: the seam between the loop and one device, several ranks, or a recorded trace.

Called by `core`, `step_runner` and `overlap`. `execution.runners` has those for one device. An executor knows rows and
numbers (`wire.step`), no requests. It keeps the rows' state between steps. Torch-free.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

Read = Callable[[], StepResult]
"""Waits for the result of a step. Called once."""

Sample = Callable[[Sequence[RowMask]], Read]
"""Chooses the tokens of a step that is begun, among those that the masks allow. Called once, before the next begins."""


class Executor(Protocol):
    """Steps run one at a time, in the order in which they are begun."""

    @property
    def facts(self) -> ModelFacts:
        """Of the model that it has loaded."""
        ...

    @property
    def extra_warmup_tokens(self) -> int:
        """A lone request of so many tokens runs what no other step does, for warm-up; 0: none."""
        ...

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Rows of the steps that it has captured, ascending: a step of decodes costs as much as the next larger one."""
        ...

    def begin(self, plan: StepPlan) -> Sample:
        """Gives the step's forward to the device, which computes it while the caller makes the masks.

        The next step may be begun before this one's result is read: it finds the sampled tokens in its rows. All three
        calls raise whatever the model, its kernels or the device raise; then the plan's rows may hold anything.
        """
        ...

    def free_memory(self) -> None:
        """After a step that raised: gives back what is cached. Raises if the device is broken."""
        ...


def compute(executor: Executor, plan: StepPlan) -> StepResult:
    """An unconstrained step, from its plan to its result."""
    sample = executor.begin(plan)
    read = sample(())
    return read()
