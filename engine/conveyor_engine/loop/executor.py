"""The interface of executors, which run the loop's plans: on one device, on several ranks, or in virtual time.

Called by `core`, `step_runner` and `overlap`. `execution.runners` implements it for one device. An executor gets rows
and numbers (`wire.step`), not requests, and keeps the rows' state between steps. Without torch.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from conveyor_engine.errors import ModelError
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult
from conveyor_protocol.failure_reasons import FailureReason

Read = Callable[[], StepResult]
"""Waits for the result of a step and returns it. Called once."""

Sample = Callable[[Sequence[RowMask]], Read]
"""Samples a begun step's tokens among those that the masks allow. Called once, before the next step begins."""


class Executor(Protocol):
    """Steps run one at a time, in the order in which they are begun."""

    @property
    def facts(self) -> ModelFacts:
        """Facts about the loaded model."""
        ...

    @property
    def extra_warmup_tokens(self) -> Sequence[int]:
        """Tokens of extra warm-up requests, one for each kind of step that no other warm-up step has."""
        ...

    @property
    def graph_sizes(self) -> Sequence[int]:
        """Numbers of rows of the captured graphs, ascending.

        A step of decodes runs in the smallest graph with enough rows.
        """
        ...

    def begin(self, plan: StepPlan) -> Sample:
        """Begin the step's forward pass. The device computes it while the caller builds the masks.

        The next step may begin before this one's result is read, because the sampled tokens are kept in the rows.
        `begin`, `Sample` and `Read` raise any exception of the model, its kernels or the device. The plan's rows are
        then undefined.
        """
        ...

    def free_memory(self) -> None:
        """Free cached memory. Called after a step that raised. Raises if the device is broken."""
        ...


class AdapterCopy(Protocol):
    """A LoRA adapter whose files have been read into the host's memory and checked."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        ...

    @property
    def signature(self) -> object:
        """Sizes and times of its files: equal for equal files."""
        ...

    def refuse(self, why: str, reason: FailureReason) -> ModelError:
        """Return the error that names the adapter."""
        ...


class TakesAdapters(Protocol):
    """What an executor also does if its task has adapters."""

    def count_free_bytes(self) -> int:
        """Return the host's free memory that no step needs."""
        ...

    def read_adapter(self, name: str, directory: str) -> AdapterCopy:
        """Read a LoRA adapter's files. This may take long, and runs in another thread than the steps.

        Raises ModelError, also if the adapter does not fit the model.
        """
        ...

    def load_adapter(self, number: int, copy: Any) -> Iterator[None]:
        """Return an iterator that loads an adapter one layer at a time, with steps in between.

        The iterator raises ModelError, and leaves nothing then.

        number: what rows of later plans have for the adapter. copy: what `read_adapter` returned.
        """
        ...

    def unload_adapter(self, number: int) -> None:
        """Free what an adapter takes. No later plan has it."""
        ...


def compute(executor: Executor, plan: StepPlan) -> StepResult:
    """Compute a step without constraints, and return its result."""
    sample = executor.begin(plan)
    read = sample(())
    return read()
