"""The scheduler's record of one step, from its plan to its result. Kept by `running_batch`.

The record contains requests. The plan that is built from it (`wire.step`) contains only rows and numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.wire.step import AdmittedRow, StepPlan, WantedPicture


class Work(NamedTuple):
    """The part of a step that belongs to one request."""

    request: RequestState
    num_tokens: int
    num_logits: int  # logits from which tokens are sampled
    admission: int  # `admission` of the request when the step was planned
    num_scored: int = 0  # further logits, which give log probabilities of the prompt's tokens
    sits_out: bool = False  # the request is not given the token that the step samples for it

    @property
    def is_wanted(self) -> bool:
        """Whether the request still needs the result. False if it was aborted, preempted or ended after the plan."""
        return self.request.admission == self.admission


class Reading(NamedTuple):
    """What the draft model reads of one request before a step."""

    request: RequestState
    admission: int  # of the request when the step was planned
    first: int  # index of the first token
    num_tokens: int
    num_drafts: int  # that it guesses behind them; 0 while further tokens are unread

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.first + self.num_tokens


@dataclass(slots=True)
class Step:
    """One step. Requests with a single pending token come first, and each of them samples a token.

    They are `decodes`, or `drafted` if they also compute drafts of their next tokens.
    """

    number: int
    decodes: list[RequestState] = field(default_factory=list)
    drafted: list[tuple[RequestState, list[int]]] = field(default_factory=list)  # each with its drafts
    readings: list[Reading] = field(default_factory=list)  # of the draft model; those with drafts are `drafted` too
    forwards: list[tuple[int, int, float]] = field(default_factory=list)  # of the draft model, see `StepResult`
    prefills: list[tuple[RequestState, int]] = field(default_factory=list)  # each with its number of tokens
    planned_at: float = 0.0  # the scheduler's clock
    num_tokens: int = 0
    num_logits: int = 0
    wanted_pictures: list[WantedPicture] = field(default_factory=list)  # to encode beside the step
    held_pictures: list[bytes] = field(default_factory=list)  # encoded ones whose features are still needed
    images_first: bool = False  # whether wanted pictures go before decodes
    first_seeing: RequestState | None = None  # the request of the first wanted picture
    largest_tokens: int = 0  # the most tokens of one request
    num_padding_tokens: int = 0  # dummy tokens, which are computed but never returned
    work: list[Work] = field(default_factory=list)  # set by `plan`, in the plan's order
    orphaned: set[int] = field(default_factory=set)  # blocks that this step writes for requests that left the batch

    def add(self, request: RequestState, num_tokens: int) -> None:
        """Add the next `num_tokens` tokens of the request to the step."""
        if request.num_pending_tokens == 1:
            self.decodes.append(request)
        else:
            self.prefills.append((request, num_tokens))
        self.num_tokens += num_tokens
        self.num_logits += int(num_tokens == request.num_pending_tokens) + request.count_scored(num_tokens)
        self.largest_tokens = max(self.largest_tokens, num_tokens)
        self.num_padding_tokens += num_tokens if request.steps_dummies else 0

    def add_drafts(self, drafted: list[tuple[RequestState, list[int]]]) -> None:
        """Let some of the decodes compute drafts too. Each draft is a token of the step, and gets logits."""
        self.drafted = drafted
        moved = {request.row for request, _ in drafted}
        self.decodes = [request for request in self.decodes if request.row not in moved]
        num_drafts = self.num_drafts
        self.num_tokens += num_drafts
        self.num_logits += num_drafts

    @property
    def num_drafts(self) -> int:
        return sum(len(drafts) for _, drafts in self.drafted)

    @property
    def has_drafts(self) -> bool:
        """Whether a request has drafts, or the draft model reads."""
        return bool(self.drafted or self.readings)

    @property
    def draft_seconds(self) -> float:
        """How long the draft model took."""
        return sum(seconds for _, _, seconds in self.forwards)

    @property
    def num_decoding(self) -> int:
        """Number of requests with a single pending token."""
        return len(self.decodes) + len(self.drafted)

    @property
    def has_suspect(self) -> bool:
        """Whether a request is computed alone, so that no other may take part."""
        return any(request.is_suspect for request in (*self.decodes[:1], *(first for first, _ in self.prefills[:1])))

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens without the one pending token of each request that decodes. Drafts are included."""
        return self.num_tokens - self.num_decoding

    def plan(self) -> StepPlan:
        """Build the plan, which contains only numbers. From now on the step's tokens count as scheduled."""
        self.work = [Work(request, 1, 1, request.admission) for request in self.decodes]
        self.work += [Work(r, 1 + len(drafts), 1 + len(drafts), r.admission) for r, drafts in self.drafted]
        self.work += [
            Work(r, n, int(n == r.num_pending_tokens), r.admission, r.count_scored(n)) for r, n in self.prefills
        ]
        admitted, new_blocks, new_window_blocks = _changes(self.work)
        plan = StepPlan(
            number=self.number,
            admitted=admitted,
            new_blocks=new_blocks,
            new_window_blocks=new_window_blocks,
            rows=[work.request.row for work in self.work],
            num_computed_tokens=[work.request.num_scheduled_tokens for work in self.work],
            num_tokens=[work.num_tokens for work in self.work],
            num_logits=[work.num_scored + work.num_logits for work in self.work],
            num_decodes=len(self.decodes),
            wanted_pictures=self.wanted_pictures,
            held_pictures=self.held_pictures,
            images_first=self.images_first,
            drafts=[drafts for _, drafts in self.drafted],
            readings=[(each.request.row, each.first, each.num_tokens) for each in self.readings],
        )
        for work in self.work:
            work.request.num_scheduled_tokens += work.num_tokens
            work.request.num_awaited_tokens += work.num_logits
        return plan

    def sampling_requests(self) -> Iterator[RequestState]:
        """Return the requests that get a token from this step."""
        return (work.request for work in self.work if work.num_logits and work.is_wanted and not work.request.finished)

    def sit_out(self, index: int) -> None:
        """Give a request no token of this step, although the step computes it. Its last token is computed again."""
        work = self.work[index]
        self.work[index] = work._replace(num_tokens=work.num_tokens - 1, num_logits=0, sits_out=True)
        work.request.num_scheduled_tokens -= 1
        work.request.num_awaited_tokens -= 1

    def acquit(self) -> None:
        """Let the step's suspect join the others again, if it has computed all tokens of the step that failed."""
        for request in (work.request for work in self.work):
            if request.num_computed_tokens >= request.num_failed_tokens:
                request.num_failed_tokens = 0

    def undo(self) -> list[Work]:
        """Undo the scheduling of a step that is not computed as planned. Returns the work that is still wanted."""
        wanted = [work for work in self.work if work.is_wanted]
        for work in wanted:
            work.request.num_scheduled_tokens -= work.num_tokens
            work.request.num_awaited_tokens -= work.num_logits
            work.request.num_sent_blocks = -1  # the executor's copy may be stale
        return wanted


def halves(work: list[Work]) -> Iterator[list[Work]]:
    """Yield the older half of the work, then the newer half, which may share blocks that the older half writes."""
    in_order = sorted(work, key=lambda item: item.request.serial)
    middle = (len(in_order) + 1) // 2
    yield from (in_order[:middle], in_order[middle:])


def _changes(
    works: list[Work],
) -> tuple[list[AdmittedRow], list[tuple[int, list[int]]], list[tuple[int, int, list[int]]]]:
    """Return the rows to send in full, because the executor's copy is stale, and the new blocks of other rows."""
    admitted: list[AdmittedRow] = []
    new_blocks: list[tuple[int, list[int]]] = []
    new_window_blocks: list[tuple[int, int, list[int]]] = []
    for work in works:
        request = work.request
        num_sent, num_blocks, window = request.num_sent_blocks, len(request.block_table), request.window
        if num_sent == num_blocks and not window.num_tables:  # as most rows that decode
            continue
        if num_sent < 0:
            state = request.token_ids, request.block_table, request.sampling, request.payload, request.adapter
            admitted.append(AdmittedRow.of(request.row, *state, window.blocks, window.first))
        elif num_sent < num_blocks:
            new_blocks.append((request.row, request.block_table[num_sent:]))
        request.num_sent_blocks = num_blocks
        if window.num_tables:
            if num_sent >= 0 and window.unsent:
                new_window_blocks.append((request.row, window.end_sent, window.unsent))
            window.mark_sent()
    return admitted, new_blocks, new_window_blocks
