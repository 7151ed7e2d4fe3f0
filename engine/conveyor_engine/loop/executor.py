"""What runs the plans: the seam between the loop and one device, several ranks, or a recorded trace.

Called by `core` and `step_runner`. `execution.model_runner` is the one for one device. An executor knows rows and
numbers (`wire.step`), no requests; it keeps the rows' state between steps. Torch-free.
"""

from typing import Protocol

from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan, StepResult


class Executor(Protocol):
    """Steps run one at a time, in the order in which they come."""

    @property
    def facts(self) -> ModelFacts:
        """Of the model that it has loaded."""
        ...

    @property
    def long_decode_tokens(self) -> int:
        """A lone request of so many tokens runs what no other step does, for warm-up; 0: none."""
        ...

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises whatever the model, its kernels or the device raise; then the plan's rows may hold anything."""
        ...

    def free_memory(self) -> None:
        """After a step that raised: gives back what is cached. Raises if the device is broken."""
        ...
