"""The requests that are admitted: their rows and KV blocks, and what each of them computes in the next step.

Used by `scheduler`, which decides who is admitted and what follows from a step. Pure: no torch, no clock.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, count, islice

from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.block_tables import BlockTables
from conveyor_engine.scheduling.policy import Policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import ModelFacts
from conveyor_engine.wire.step import StepPlan

WATERMARK = 0.01  # of all blocks stay free when a request joins a running batch, so that it is not preempted at once
LONG_PROMPT_SHARE = 0.25  # of a step's tokens: a longer prompt is long, and may take no more while others decode


class RunningBatch:
    """Invariants: `requests` is in order of admission; only those in it hold a row and blocks, and only finished ones
    of a batch that keeps together may be in it without.
    """

    def __init__(
        self,
        policy: Policy,
        facts: ModelFacts,
        *,
        prefix_caching: bool,
        whole_prompts: bool,
        on_preempt: Callable[[RequestState], None],
    ) -> None:
        """`whole_prompts`: no prompt is cut. `on_preempt` is told of each request that had to give up its place."""
        self._policy = policy
        self._whole_prompts = whole_prompts
        self._on_preempt = on_preempt
        self._max_model_len = facts.max_model_len
        self._max_tokens = facts.max_num_batched_tokens
        self._long_prompt_tokens = max(1, int(facts.max_num_batched_tokens * LONG_PROMPT_SHARE))
        self._long_prompt_budget = 0  # what is left of this step for long prompts
        self._watermark_blocks = int(facts.num_kv_blocks * WATERMARK)
        self.blocks = BlockManager(facts.num_kv_blocks)
        self.tables = BlockTables(self.blocks, facts.block_size, facts.max_num_seqs, prefix_caching=prefix_caching)
        self._requests: list[RequestState] = []
        self._serials = count()
        self._steps: dict[int, Step] = {}  # by number: planned, and not over
        self._num_planned = 0  # steps

    @property
    def requests(self) -> Sequence[RequestState]:
        """In order of admission."""
        return self._requests

    @property
    def has_steps(self) -> bool:
        """Whether a step is planned and not over."""
        return bool(self._steps)

    def new_step(self) -> Step:
        """An empty step with the next number."""
        return Step(self._num_planned)

    def begin_step(self, step: Step) -> StepPlan:
        """The step in numbers. It counts as planned until `end_step`."""
        self._num_planned += 1
        self._steps[step.number] = step
        return step.plan()

    def step(self, number: int) -> Step:
        """The planned step with this number."""
        return self._steps[number]

    def end_step(self, number: int) -> Step:
        """The step with this number is over, whatever came of it."""
        return self._steps.pop(number)

    def remove(self, request: RequestState) -> None:
        """Takes the request out of the batch; the caller frees its row and blocks."""
        self._requests.remove(request)

    def keep(self, request_ids: Container[str]) -> None:
        """Takes all other requests out of the batch; their rows and blocks are free already."""
        self._requests = [each for each in self._requests if each.request_id in request_ids]

    def plan_step(self, step: Step, waiting: Iterable[RequestState]) -> bool:
        """What the running requests compute next, oldest first. Says whether somebody had to be preempted for it."""
        num_requests = len(self._requests)
        self._long_prompt_budget = self._plan_long_prompts(waiting)
        self.feed_all(step)
        preempted = len(self._requests) < num_requests
        if preempted and not step.num_tokens:  # older requests have lost their places
            self.feed_all(step)
        return preempted

    def has_budget(self, step: Step, request: RequestState) -> bool:
        """Whether the step has room for tokens of a request that would join."""
        if self._whole_prompts:
            return self._whole_chunk(request, step) > 0
        return step.num_tokens < self._max_tokens

    def feed_all(self, step: Step) -> None:
        """Gives each request what the budget allows."""
        for request in self._rows_to_step():
            self.feed(step, request)

    def feed(self, step: Step, request: RequestState) -> None:
        """Gives the request what the budget, the share of long prompts and the free blocks allow."""
        if request.row < 0:
            return  # preempted for an older one
        num_tokens = self._chunk(request, step)
        if num_tokens and self._make_room(request, num_tokens):
            step.add(request, num_tokens)
            self.tables.register(request, request.num_scheduled_tokens + num_tokens)

    def _plan_long_prompts(self, waiting: Iterable[RequestState]) -> int:
        """How many tokens of this step may go to long prompts, so that they neither hold up decodes nor short prompts.

        Where requests join: a share of the step beside decodes, else what the short prompts leave. Chunked prefill as
        in Sarathi-Serve (Agrawal et al., OSDI'24), with a limit for all long prompts together as vLLM has it.
        """
        if not self._policy.joins or self._whole_prompts:
            return self._max_tokens
        if any(request.num_pending_tokens == 1 for request in self._requests):
            return self._long_prompt_tokens
        may_join = islice(waiting, len(self.tables.free_rows))
        pending = (request.num_pending_tokens for request in chain(self._requests, may_join))
        short = sum(num_tokens for num_tokens in pending if num_tokens <= self._long_prompt_tokens)
        return max(self._long_prompt_tokens, self._max_tokens - short)

    def _rows_to_step(self) -> list[RequestState]:
        """Oldest first. Where a batch keeps together: prompts and their padding before decodes, finished rows last."""
        rows = [r for r in self._requests if r.finished is None]
        if self._policy.pads:
            goes_on = bool(rows)
            finished = (r for r in self._requests if r.finished is not None and r.row >= 0)
            rows += [r for r in finished if goes_on or r.padded_from is not None]
        if self._policy.keeps_together:
            return [r for r in rows if r.num_pending_tokens > 1 or not r.num_output_tokens] or rows
        return rows

    def _chunk(self, request: RequestState, step: Step) -> int:
        if request.awaits_its_last_token:
            return 0
        if self._whole_prompts:
            return self._whole_chunk(request, step)
        num_tokens = request.num_pending_tokens - (request.padded_from is not None)
        budget = self._max_tokens - step.num_tokens
        if num_tokens <= self._long_prompt_tokens:
            return min(num_tokens, budget)
        num_tokens = min(num_tokens, budget, self._long_prompt_budget)
        self._long_prompt_budget -= num_tokens
        return num_tokens

    def _whole_chunk(self, request: RequestState, step: Step) -> int:
        """All of the prompt, or nothing yet. One that is longer than the budget has a step to itself."""
        fits = step.num_tokens + request.num_pending_tokens <= self._max_tokens
        return request.num_pending_tokens if fits or not step.num_tokens else 0

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        """Blocks for its next tokens, of finished rows or by preempting the newest requests. False if that was itself.

        A padded row has room for its padding too, as far as any row may be long.
        """
        padding = request.num_padding_tokens if request.padded_from is None else 0
        num_tokens = min(request.num_scheduled_tokens + num_tokens + padding, self._max_model_len)
        while not self.tables.grow(request, num_tokens):
            if request.finished is not None:
                self.retire(request)
            elif not self._retire_newest():
                self.preempt(next(r for r in reversed(self._requests) if r.finished is None))
            if request.row < 0:
                return False
        return True

    def _retire_newest(self) -> bool:
        """Takes row and blocks from the newest finished request. False if there is none."""
        for request in reversed(self._requests):
            if request.finished is not None and request.row >= 0:
                self.retire(request)
                return True
        return False

    def retire(self, request: RequestState) -> None:
        """A finished request gives up row, blocks and padding; it stays in the batch, for its answer is held."""
        request.unpad()
        self.release(request)

    def release(self, request: RequestState) -> None:
        """Frees row and blocks. Steps that are not over may still write the blocks, before their next holder does."""
        unwritten = self.tables.unschedule(request, request.num_computed_tokens)
        for step in self._steps.values():
            step.orphaned |= unwritten
        self.tables.release(request)

    def preempt(self, request: RequestState) -> None:
        """Takes the request out of the batch; its tokens are computed again, or found in the prefix cache."""
        self.remove(request)
        request.unpad()
        request.num_padding_tokens = 0
        self.release(request)
        request.rewind(0)
        self._on_preempt(request)

    def admit(self, request: RequestState, step: Step) -> bool:
        """A row, and blocks for its tokens so far; in a closed batch for those to be expected too. False if they lack.

        When nobody else of its batch takes part in the step, the finished rows make way for one that comes back.
        """
        num_tokens = len(request.token_ids)
        if not self._policy.joins:
            num_tokens = max(num_tokens, request.expected_total_tokens)
        while not self.tables.reserve(request, num_tokens, self._spare_blocks()):
            if step.num_tokens or not self._retire_newest():
                return False
        request.serial = next(self._serials)
        self._requests.append(request)
        return True

    def _spare_blocks(self) -> int:
        return self._watermark_blocks if any(request.row >= 0 for request in self._requests) else 0

    def preempt_readers(self, unwritten: set[int]) -> None:
        """Preempts the requests that read one of these blocks. A request that shares what a step was to write was
        admitted in that step or later, so all that were admitted after the first reader go too. Finished ones keep
        their answers.
        """
        for index, request in enumerate(self._requests):
            if not unwritten.isdisjoint(self.tables.computed_blocks(request)):
                for newer in reversed(self._requests[index:]):
                    if newer.finished is None:
                        self.preempt(newer)
                    elif newer.row >= 0:
                        self.retire(newer)
                return

    @contextmanager
    def reserve(self, request: RequestState) -> Iterator[None]:
        """A row and blocks for a request that is in no queue. After a failed step, so that there are some."""
        reserved = self.tables.reserve(request, len(request.token_ids), 0)
        assert reserved
        try:
            yield
        finally:
            self.tables.release(request)
