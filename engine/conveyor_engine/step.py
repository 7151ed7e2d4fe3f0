"""One step: what the scheduler plans, and what the model runner gives back. Plain data, torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from conveyor_engine.request import TokenLogprobs
from conveyor_engine.request_state import RequestState


@dataclass(slots=True)
class StepPlan:
    """One step. Requests with a single pending token come first; they all sample."""

    decodes: list[RequestState] = field(default_factory=list)
    prefills: list[tuple[RequestState, int]] = field(default_factory=list)  # and how many tokens
    num_tokens: int = 0  # padding included
    num_padding_tokens: int = 0

    def sampling(self) -> list[RequestState]:
        """The requests that get a token from this step, in the order of the sampled tokens."""
        finished = [r for r, n in self.prefills if n == r.num_pending_tokens]
        return self.decodes + finished


@dataclass(slots=True)
class Sampled:
    """What a step sampled, one entry per `StepPlan.sampling()`. Token -1: the logits were not finite."""

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
