"""The scheduler's record of one step, from its plan to its result. Used by `scheduler` and `running_batch`.

The record knows the requests; the plan that is made of it (`wire.step`) knows rows and numbers only.
"""

from dataclasses import dataclass, field

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.wire.step import AdmittedRow, StepPlan


@dataclass(slots=True)
class Step:
    """Requests with a single pending token come first; they all sample."""

    number: int
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
        """The requests that get tokens from this step, in the order of the result."""
        finished = [r for r, n in self.prefills if n == r.num_pending_tokens]
        return self.decodes + finished

    def plan(self) -> StepPlan:
        """The step in numbers. Rows that the executor does not know, or not as they are, are told whole."""
        work = self.work()
        admitted: list[AdmittedRow] = []
        new_blocks: list[tuple[int, list[int]]] = []
        for request, _ in work:
            num_blocks, num_sent = len(request.block_table), request.num_sent_blocks
            if num_blocks == num_sent:
                continue
            if num_sent < 0:
                admitted.append(_admitted_row(request))
            else:
                new_blocks.append((request.row, request.block_table[num_sent:]))
            request.num_sent_blocks = num_blocks
        return StepPlan(
            number=self.number,
            admitted=admitted,
            new_blocks=new_blocks,
            rows=[request.row for request, _ in work],
            num_computed_tokens=[request.num_computed_tokens for request, _ in work],
            num_tokens=[num_tokens for _, num_tokens in work],
            num_logits=[1] * len(self.decodes) + [int(n == r.num_pending_tokens) for r, n in self.prefills],
            num_decodes=len(self.decodes),
        )

    def split(self) -> tuple[list[tuple[RequestState, int]], list[tuple[RequestState, int]]]:
        """The older half of the requests, and the newer one, which may share blocks that the older one writes."""
        work = sorted(self.work(), key=lambda item: item[0].serial)
        middle = (len(work) + 1) // 2
        return work[:middle], work[middle:]


def _admitted_row(request: RequestState) -> AdmittedRow:
    return AdmittedRow(request.row, list(request.token_ids), list(request.block_table), request.sampling)
