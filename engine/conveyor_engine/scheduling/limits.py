"""Limits of the requests that run at once, and of the prompt tokens of a step. `objectives` changes both.

Read by `running_batch`, `token_budget` and `policy` before each step. Pure.
"""

from dataclasses import dataclass
from typing import Self

from conveyor_engine.wire.request import ModelFacts


@dataclass(slots=True)
class Limits:
    """The current limits, which never exceed the declared ones. A lower limit does not end running requests."""

    num_rows: int
    prompt_tokens: int  # of one step, not counting its decodes

    @classmethod
    def declared(cls, facts: ModelFacts) -> Self:
        """Return the declared limits, for which the executor has room."""
        return cls(facts.max_num_seqs, facts.max_num_batched_tokens)
