"""Constraints on the tokens of requests, and the source of their masks, as the scheduler sees both.

`masks` implements them in another process.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Protocol


class Constraint(ABC):
    """A constraint on the next tokens of a request, such as a grammar, with its state after the tokens so far.

    The state advances only by tokens that the request keeps. So it never has to be rolled back when the results of
    steps that ran ahead are discarded. Another process may keep it. Then the state is known only some time after a
    token is accepted: see `is_ready`.
    """

    @property
    def is_ready(self) -> bool:
        """Whether `is_complete` and `build_mask` have the state after all tokens, or the constraint has failed."""
        return True

    @property
    def failure(self) -> tuple[str, bool] | None:
        """Why the answer cannot go on, and whether that is because of its cost; None if it can go on."""
        return None

    def open(self) -> None:  # noqa: B027  # most constraints keep nothing
        """Prepare the first mask. Called when the request gets a row, and again after each preemption."""

    def close(self) -> None:  # noqa: B027
        """Free what `open` has taken. Called when the request loses its row."""

    @abstractmethod
    def accept(self, token_id: int) -> None:
        """Advance the state by this token, which the mask must have allowed."""

    @abstractmethod
    def build_mask(self) -> bytes:
        """Return the allowed next tokens: see `wire.step.RowMask.allowed`.

        If there are none, the request ends in an error.
        """

    @property
    @abstractmethod
    def is_complete(self) -> bool:
        """Whether only the end of the answer is allowed next."""


class MaskSource(Protocol):
    """Whatever builds the masks of constraints, in another process."""

    def flush(self) -> None:
        """Send what has been opened, accepted and closed."""
        ...

    def wait(self, constraints: Collection[Constraint], seconds: float) -> None:
        """Return when these are ready, or after this time."""
        ...

    def sleep(self) -> None:
        """Wake the loop when the next mask is ready."""
        ...
