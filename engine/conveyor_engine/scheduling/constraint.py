"""What limits the tokens that a request may be given next, such as a grammar. `request_state` keeps it.

Pure: a constraint lives on the host, and hears only tokens that the request keeps. So steps that run ahead need no
rollback: what they sample for a request that has ended is discarded before it comes here.
"""

from typing import Protocol


class Constraint(Protocol):
    """The state of one request's constraint, after the tokens that it has been given so far."""

    def accept(self, token_id: int) -> None:
        """The request has been given this token, which was allowed."""
        ...

    def build_mask(self) -> bytes:
        """The tokens that may come next, at least one: see `wire.step.RowMask.allowed`."""
        ...
