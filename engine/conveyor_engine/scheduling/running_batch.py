"""The admitted requests, their rows and KV blocks, and the steps that are not over.

Used by `scheduler`, which decides which requests are admitted, and by `outputs`, which frees finished ones. No other
module changes rows, blocks or open steps. `outputs` and `scheduler` also change the requests themselves: their tokens,
counts and ends. Pure: no torch, no clock.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import count, islice
from operator import attrgetter

from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.block_tables import BlockTables
from conveyor_engine.scheduling.image_turns import ImageTurns
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.model_drafts import ModelDrafts
from conveyor_engine.scheduling.policy import Policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.shares import Shares
from conveyor_engine.scheduling.speculation import Speculation
from conveyor_engine.scheduling.step import Step, halves
from conveyor_engine.scheduling.token_budget import TokenBudget
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan

FIRST_PAUSE = 8  # so many steps have no drafts after a step with drafts that raised
WATERMARK = 0.01  # share of blocks that stay free when a request joins others, so that running requests can grow

_LEVEL = attrgetter("level")


class RunningBatch:
    """Invariants: `requests` is in order of admission. Each of them has a row and blocks, and no other request has any.
    Exception: finished requests of a batch that keeps together may have neither.
    """

    def __init__(
        self,
        policy: Policy,
        facts: ModelFacts,
        *,
        limits: Limits,
        shares: Shares,
        prefix_caching: bool,
        whole_prompts: bool,
        packs: bool,
        on_preempt: Callable[[RequestState], None],
        speculation: Speculation | ModelDrafts | None = None,
    ) -> None:
        """`whole_prompts`, `packs`: see `tasks.Task`. `on_preempt` is called with each request that is preempted.

        `speculation` adds drafts to steps; None: steps have none.
        """
        self._policy = policy
        self._on_preempt = on_preempt
        self._max_model_len = facts.max_model_len
        self._limits = limits
        self._max_num_seqs = facts.max_num_seqs
        self._has_states = facts.has_states
        self._speculation, self._num_tables = speculation, facts.kv_tables.number
        self._image_turns = ImageTurns() if policy.joins and facts.encodes_beside else None
        self._budget = TokenBudget(facts, limits, joins=policy.joins, whole_prompts=whole_prompts, packs=packs)
        self._watermark_blocks = int(facts.num_kv_blocks * WATERMARK)
        self.blocks = BlockManager(facts.num_kv_blocks)
        self._tables = BlockTables(
            self.blocks,
            facts.block_size,
            facts.max_num_seqs,
            prefix_caching=prefix_caching,
            shares=shares,
            tables=facts.kv_tables,
            step_tokens=facts.max_num_batched_tokens,
        )
        self._requests: dict[str, RequestState] = {}
        self._levels: Counter[int] = Counter()  # number of admitted requests at each level
        self._serials = count()
        self._steps: dict[int, Step] = {}  # planned steps that are not over, by number
        self._num_planned = 0  # number of planned steps so far
        self._num_without_drafts, self._pause = 0, FIRST_PAUSE  # next steps that have no drafts, and after a failure

    @property
    def requests(self) -> Collection[RequestState]:
        """The admitted requests in order of admission."""
        return self._requests.values()

    @property
    def num_free_rows(self) -> int:
        """Number of rows that requests may still get at the current limit."""
        return max(0, len(self._tables.free_rows) - (self._max_num_seqs - self._limits.num_rows))

    @property
    def num_held_blocks(self) -> int:
        """Number of blocks that the requests have; a shared block counts for each of them."""
        return self._tables.num_held

    # --- steps ---

    @property
    def has_steps(self) -> bool:
        """Whether a step is planned and not over."""
        return bool(self._steps)

    def new_step(self) -> Step:
        """Return an empty step with the next number."""
        return Step(self._num_planned)

    def want_pictures(self, step: Step) -> bool:
        """Let the step encode the pictures that requests wait for. Returns whether there are any."""
        if self._image_turns is not None:
            self._image_turns.add(step, self._rows_to_step())
        return bool(step.wanted_pictures)

    def start_step(self, step: Step) -> StepPlan:
        """Plan the step. It is open until `end_step`, `undo_step` or `halve_step` is called with its number."""
        if self._num_without_drafts:
            self._num_without_drafts -= 1
        elif self._speculation is not None and step.decodes:
            self._add_drafts(self._speculation, step)
        return self._open(step)

    def _open(self, step: Step) -> StepPlan:
        self._num_planned += 1
        self._steps[step.number] = step
        return step.plan()

    def _add_drafts(self, speculation: Speculation | ModelDrafts, step: Step) -> None:
        """Let requests that decode compute drafts too, in the room that the step leaves.

        Drafts get no blocks that a request may need for the next token of its own.
        """
        num_logits = self._max_num_seqs + speculation.max_tokens
        num_tokens = self._budget.room(step)
        room = min(num_tokens, num_logits - step.num_logits)
        num_kept = self._num_tables * len(self._requests)
        drafted = []
        for request, drafts in speculation.propose(step.decodes, room, num_tokens):
            end = request.num_scheduled_tokens + 1 + len(drafts)
            if self.blocks.num_free > num_kept and self._tables.grow(request, end, end):
                drafted.append((request, drafts))
        if drafted:
            step.add_drafts(drafted)
        step.readings = speculation.list_readings(drafted)

    def step(self, number: int) -> Step:
        """Return the planned step with this number."""
        return self._steps[number]

    def end_step(self, number: int, encoded: Collection[bytes] = ()) -> Step:
        """End a step that has been computed. Requests go on that waited for the `encoded` pictures."""
        if self._image_turns is not None:
            self._image_turns.note_encoded(encoded, self.requests)
        step = self._steps.pop(number)
        if step.has_drafts:
            self._pause = max(FIRST_PAUSE, self._pause // 2)
        return step

    def note_raised(self, step: Step) -> None:
        """Plan no drafts for a while if the step had drafts, which may be why it raised: each time twice as long."""
        if step.has_drafts:
            self._num_without_drafts, self._pause = self._pause, 2 * self._pause

    def undo_step(self, number: int) -> tuple[list[RequestState], set[int]]:
        """End a step that is not computed. Returns its requests that have not ended, and the blocks left unwritten.

        These blocks are no longer found as cached prefixes, but requests may already use them. So the caller must pass
        them to `preempt_readers`.
        """
        step = self._steps.pop(number)
        requests = [work.request for work in step.undo()]
        unwritten = step.orphaned.union(*(self._tables.unschedule(r, r.num_scheduled_tokens) for r in requests))
        return requests, unwritten

    def halve_step(self, number: int) -> Iterator[StepPlan]:
        """End the only open step without computing it. Plan a step for its older requests, then one for the newer ones.

        A request that has left the batch is in neither half. Halves have no drafts, which may be why the step failed.
        """
        step = self._steps.pop(number)
        wanted = step.undo()
        late = [work.request for work in wanted if work.sits_out]  # the halves do not write their last tokens
        self.preempt_readers(step.orphaned.union(*(self._tables.unschedule(r, r.num_scheduled_tokens) for r in late)))
        for works in halves(wanted):
            half = self.new_step()
            half.planned_at = step.planned_at
            for work in works:
                if work.is_wanted and work.num_tokens:
                    half.add(work.request, min(work.num_tokens, work.request.num_pending_tokens))
            if half.num_tokens:
                yield self._open(half)

    @contextmanager
    def plan_alone(self, request: RequestState) -> Iterator[StepPlan]:
        """Yield a plan of one token for a request outside the queues.

        Used after a failed step, so a row and a block are free.
        """
        allocated = self._tables.allocate(request, request.num_input_tokens, 0)
        assert allocated
        try:
            step = self.new_step()
            step.add(request, 1)
            yield step.plan()
        finally:
            self._tables.free(request)

    # --- what a step computes ---

    def schedule_running(self, step: Step, waiting: Iterable[RequestState]) -> bool:
        """Add the next tokens of the running requests, in their order. Returns whether any request was preempted."""
        num_requests = len(self._requests)
        images_first = self._image_turns is not None and self._image_turns.go_first(self.requests)
        self._budget.start_step(self.requests, islice(waiting, self.num_free_rows), images_first=images_first)
        self.schedule_all(step)
        preempted = len(self._requests) < num_requests
        if preempted and not step.num_tokens:  # only prompts were tried, which go first
            self.schedule_all(step)
        return preempted

    def has_budget(self, step: Step, request: RequestState) -> bool:
        """Return whether the step has room for tokens of a request that would join."""
        return self._budget.has_room(step, request)

    def schedule_all(self, step: Step) -> None:
        """Add the tokens that the budget allows, for each request."""
        for request in self._rows_to_step():
            self.schedule(step, request)

    def schedule(self, step: Step, request: RequestState) -> None:
        """Add the request's tokens that the budget, the share of long prompts and the free blocks allow."""
        if request.row < 0:
            return  # preempted for an earlier request of this step
        if self._has_states and not self._may_compute(step, request):
            return
        num_tokens = min(self._budget.chunk(step, request), self._logits_room(step, request))
        if num_tokens and self._allocate(request, num_tokens):
            step.add(request, num_tokens)
            self._tables.register(request, request.num_scheduled_tokens + num_tokens)

    def _may_compute(self, step: Step, request: RequestState) -> bool:
        """Return whether a request with states may take part: not beside a suspect, and not before a late mask."""
        if step.num_tokens and (request.is_suspect or step.has_suspect):
            return False
        return not request.sits_out and not (request.is_late and request.num_awaited_tokens)

    def _logits_room(self, step: Step, request: RequestState) -> int:
        """Return how many tokens the request may compute.

        A step has logits for `max_num_seqs` tokens, one for each row.

        A prompt whose log probabilities are requested needs logits for each token, until it is scored. It gets the
        logits that other rows do not need.
        """
        free = self._max_num_seqs - step.num_logits
        if request.is_scored:
            return self._max_model_len if free else 0
        others = len(self._requests) - len(step.decodes) - len(step.prefills) - 1
        return max(free - others, min(free, 1))

    def _rows_to_step(self) -> list[RequestState]:
        """Return the rows in the order in which they are scheduled: lowest level first, then oldest first.

        The last unfinished request in this order is preempted next. In a batch that keeps together, prompts and their
        padding come before decodes, and finished rows come last. A suspect is the only row.
        """
        rows = [r for r in self.requests if r.finished is None and (r.constraint is None or not r.sits_out)]
        if len(self._levels) > 1:
            rows.sort(key=_LEVEL)
        if self._has_states and (suspect := next((r for r in rows if r.is_suspect), None)):
            return [suspect]
        if self._policy.pads:
            goes_on = bool(rows)
            finished = (r for r in self.requests if r.finished is not None and r.row >= 0)
            rows += [r for r in finished if goes_on or r.padded_from is not None]
        if self._policy.keeps_together:
            return [r for r in rows if r.num_pending_tokens > 1 or not r.num_output_tokens] or rows
        return rows

    # --- rows and blocks ---

    def _allocate(self, request: RequestState, num_tokens: int) -> bool:
        """Allocate blocks for the request's next tokens. Returns False if the request itself had to be preempted.

        If too few blocks are free, finished rows are freed, and then requests are preempted: the newest of the highest
        level first. A padded row also gets blocks for its padding, up to `max_model_len`.
        """
        padding = request.num_padding_tokens if request.padded_from is None else 0
        num_scheduled = request.num_scheduled_tokens + num_tokens
        num_reserved = min(num_scheduled + padding, self._max_model_len)
        while not self._tables.grow(request, num_reserved, num_scheduled):
            if request.finished is not None:
                self.retire(request)
            elif not self._retire_newest():
                unfinished = (r for r in reversed(self._requests.values()) if r.finished is None)
                self.preempt(max(unfinished, key=_LEVEL))
            if request.row < 0:
                return False
        return True

    def _retire_newest(self) -> bool:
        """Free row and blocks of the newest finished request. Returns False if there is none."""
        for request in reversed(self._requests.values()):
            if request.finished is not None and request.row >= 0:
                self.retire(request)
                return True
        return False

    def retire(self, request: RequestState) -> None:
        """Free row, blocks and padding of a finished request.

        It stays in the batch, because its answer is held back.
        """
        request.unpad()
        self._free_row(request)

    def free(self, request: RequestState) -> None:
        """Remove the request from the batch and free its row and blocks, if it has any."""
        if self._requests.pop(request.request_id, None) is not None:
            self._levels[request.level] -= 1
            if not self._levels[request.level]:
                del self._levels[request.level]
        if request.row >= 0:
            self._free_row(request)

    def _free_row(self, request: RequestState) -> None:
        """Free the request's row and blocks.

        Open steps may still write these blocks, but always before their next user does.
        """
        unwritten = self._tables.unschedule(request, request.num_computed_tokens)
        for step in self._steps.values():
            step.orphaned |= unwritten
        self._tables.free(request)
        if request.constraint is not None:
            request.constraint.close()

    def evict(self, request: RequestState) -> None:
        """Remove the request's blocks from the prefix cache, because they may contain NaN."""
        self._tables.evict(request)

    def preempt(self, request: RequestState) -> None:
        """Remove the request from the batch. Its tokens are computed again later, or found in the prefix cache."""
        request.unpad()
        request.num_padding_tokens = 0
        self.free(request)
        request.rewind(0)
        self._on_preempt(request)

    def admit(self, request: RequestState, step: Step) -> bool:
        """Allocate a row, and blocks for the request's tokens so far; in a closed batch also for its expected tokens.

        Returns False if too few are free. If no other request takes part in the step, finished rows are freed first, so
        that a preempted request can resume.
        """
        num_tokens = self._count_reserved_tokens(request)
        while not (self.num_free_rows and self._tables.allocate(request, num_tokens, self._spare_blocks())):
            if step.num_tokens or not self._retire_newest():
                return False
        request.serial = next(self._serials)
        self._requests[request.request_id] = request
        if request.constraint is not None:
            request.constraint.open()
        self._levels[request.level] += 1
        return True

    def count_reserved_blocks(self, request: RequestState) -> int:
        """Return the number of blocks that `admit` allocates for the request, including blocks that it may share."""
        return self._tables.count_reserved(self._count_reserved_tokens(request))

    def _count_reserved_tokens(self, request: RequestState) -> int:
        expected = 0 if self._policy.joins else request.expected_total_tokens + request.payload_cost
        return max(request.num_input_tokens, expected)

    def _spare_blocks(self) -> int:
        return self._watermark_blocks if any(request.row >= 0 for request in self.requests) else 0

    def preempt_readers(self, unwritten: set[int]) -> None:
        """Preempt the first request that uses one of these unwritten blocks, and all requests admitted after it.

        So no user of the blocks is left: a request can share a block that a step writes only if it was admitted in that
        step or later. Finished requests keep their answers.
        """
        requests = list(self.requests)
        for index, request in enumerate(requests):
            if not unwritten.isdisjoint(self._tables.computed_blocks(request)):
                for newer in reversed(requests[index:]):
                    if newer.finished is None:
                        self.preempt(newer)
                    elif newer.row >= 0:
                        self.retire(newer)
                return
