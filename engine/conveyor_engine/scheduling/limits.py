"""How many requests run at once, and how many prompt tokens a step computes. `objectives` moves both.

Read by `running_batch`, `token_budget` and `policy` before each step. Pure.
"""

from dataclasses import dataclass
from typing import Self

from conveyor_engine.wire.request import ModelFacts


@dataclass(slots=True)
class Limits:
    """Never above the declared ones, which the executor has room for. A lower limit ends nothing that runs."""

    num_rows: int
    prompt_tokens: int  # of one step, beside its decodes

    @classmethod
    def declared(cls, facts: ModelFacts) -> Self:
        """All that the executor has room for."""
        return cls(facts.max_num_seqs, facts.max_num_batched_tokens)
