"""One step: what the scheduler plans, and what the model runner gives back. Plain data, torch-free."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.wire.request import TokenLogprobs


@dataclass(slots=True)
class StepPlan:
    """One step. Requests with a single pending token come first; they all sample."""

    decodes: list[RequestState] = field(default_factory=list)
    prefills: list[tuple[RequestState, int]] = field(default_factory=list)  # and how many tokens
    num_tokens: int = 0
    num_padding_tokens: int = 0  # of these, dummies: computed like the others, and seen by nobody

    def add(self, request: RequestState, num_tokens: int) -> None:
        """The next `num_tokens` tokens of the request take part."""
        if request.num_pending_tokens == 1:
            self.decodes.append(request)
        else:
            self.prefills.append((request, num_tokens))
        self.num_tokens += num_tokens
        self.num_padding_tokens += num_tokens if request.steps_dummies else 0

    def work(self) -> list[tuple[RequestState, int]]:
        """Each request with how many tokens it computes."""
        return [(request, 1) for request in self.decodes] + self.prefills

    def sampling(self) -> list[RequestState]:
        """The requests that get a token from this step, in the order of the sampled tokens."""
        finished = [r for r, n in self.prefills if n == r.num_pending_tokens]
        return self.decodes + finished

    def halves(self) -> "Iterator[StepPlan]":
        """The older half of the requests, and then the newer one, which may share blocks that the older one writes.

        Whoever has left the batch meanwhile is in neither.
        """
        work = sorted(self.work(), key=lambda item: item[0].serial)
        middle = (len(work) + 1) // 2
        for part in (work[:middle], work[middle:]):
            half = StepPlan()
            for request, num_tokens in part:
                if request.row >= 0:
                    half.add(request, num_tokens)
            if half.num_tokens:
                yield half


@dataclass(slots=True)
class Sampled:
    """What a step sampled, one entry per `StepPlan.sampling()`. Token -1: the logits were not finite."""

    token_ids: list[int]
    logprobs: Sequence[TokenLogprobs | None] | None = None
