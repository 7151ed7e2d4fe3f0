"""The limits on how many requests run at once and how many prompt tokens a step has. `objectives` changes both.

Read by `running_batch`, `token_budget` and `policy` before each step. Pure.
"""

from dataclasses import dataclass
from typing import Self

from conveyor_engine.wire.request import ModelFacts


@dataclass(slots=True)
class Limits:
    """The current limits, which never exceed the declared ones. A lower limit does not end running requests."""

    num_rows: int  # limit on the requests that run at once
    prompt_tokens: int  # limit on the tokens of one step, not counting the one token of each decode

    @classmethod
    def declared(cls, facts: ModelFacts) -> Self:
        """Return the declared limits, for which the executor has room."""
        return cls(facts.max_num_seqs, facts.max_num_batched_tokens)
