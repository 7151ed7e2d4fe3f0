"""Decides, before each step, how many tokens of which request the model computes; and what follows from the result.

A step is {request: n_tokens} under a token budget; there are no prefill and decode phases (vLLM V1's
scheduler). `core` calls `schedule`, runs the plan and calls `update`; `policy` makes the batching mode.
Pure Python: knows neither torch nor threads nor the clock (`now` is an argument).
"""

from collections import Counter, OrderedDict

import msgspec

from conveyor_engine.block_manager import BlockManager
from conveyor_engine.block_tables import BlockTables
from conveyor_engine.config import EngineConfig
from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.policy import build_policy
from conveyor_engine.request import EngineRequest, EngineStats, FinishReason, ModelFacts, RequestOutput, TokenLogprobs
from conveyor_engine.request_state import RequestState
from conveyor_engine.step import Sampled, StepPlan

WATERMARK = 0.01  # of all blocks stay free when a request joins a running batch, so that it is not preempted at once


class Scheduler:
    """Waiting queue, running batch, KV blocks.

    Invariants, after every call: a request is in exactly one of waiting, running, held or gone; only
    admitted ones (running, held) hold blocks and a row; running is in order of admission; every
    request that was added gets exactly one output with a finish reason.
    """

    def __init__(self, config: EngineConfig, facts: ModelFacts) -> None:
        self._facts = facts
        self._policy = build_policy(config, facts.max_num_batched_tokens)
        self._block_size = facts.block_size
        self._max_num_queued = config.max_num_queued_requests
        self._prefix_caching = config.prefix_caching
        self._pads = config.padding == "real" and self._policy.holds_finished
        self._watermark_blocks = int(facts.num_kv_blocks * WATERMARK)
        self.blocks = BlockManager(facts.num_kv_blocks)
        self._tables = BlockTables(self.blocks, facts.block_size, prefix_caching=config.prefix_caching)
        self.requests: dict[str, RequestState] = {}
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self.running: list[RequestState] = []
        self.held: list[RequestState] = []  # finished, but their batch is not (static)
        self._free_rows = list(range(facts.max_num_seqs - 1, -1, -1))
        self._outputs: list[RequestOutput] = []
        self._draining = False
        self._counters = EngineStats()
        self._close_reasons: Counter[str] = Counter()

    def add_request(self, request: EngineRequest) -> None:
        """Appends to the waiting queue. Raises Overloaded or InvalidRequest.

        Free places of the batch add room: an idle engine takes as long a burst as a busy one holds.
        """
        self._check(request)
        if len(self.waiting) >= self._max_num_queued + len(self._free_rows):
            raise Overloaded(f"{len(self.waiting)} requests are waiting already; try again later")
        state = RequestState(request, self._facts.eos_token_ids)
        self.requests[state.request_id] = state
        self.waiting[state.request_id] = state

    def abort(self, request_id: str) -> None:
        """Ends the request wherever it is and frees what it holds. Unknown ids are ignored. Not while a step runs."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request_id in self.waiting:
            del self.waiting[request_id]
        elif request in self.held:
            self.held.remove(request)
        else:
            self.running.remove(request)
        self._finish(request, FinishReason.ABORT)

    def drain(self) -> None:
        """Batches no longer wait to fill."""
        self._draining = True

    def has_unfinished(self) -> bool:
        """Whether some request has not had its last output taken."""
        return bool(self.requests or self._outputs)

    def next_wakeup(self, now: float) -> float | None:
        """When the next `schedule` has something to do: now, a later time, or None."""
        if self.running or self.held or self._outputs:
            return now
        if not self.waiting:
            return None
        return now if self._draining else max(now, self._policy.due_at(self.waiting.values()))

    def take_outputs(self) -> list[RequestOutput]:
        """The outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        """Gauges as of now; counters since the start."""
        return msgspec.structs.replace(
            self._counters,
            num_running=len(self.running) + len(self.held),
            num_waiting=len(self.waiting),
            kv_cache_usage=1 - self.blocks.num_free / self.blocks.num_blocks,
            batch_close_reasons=dict(self._close_reasons),
        )

    def schedule(self, now: float) -> StepPlan:
        """The next step. Running requests go first, oldest first; then waiting ones, as the policy lets them in."""
        self._release_batch()
        plan = StepPlan()
        if self._pads:
            self._pad(plan, len(self.held))
        preempted = self._schedule_running(plan)
        if self.waiting and not preempted and (self._policy.joins or not (self.running or self.held)):
            self._admit(plan, now)
        return plan

    def _schedule_running(self, plan: StepPlan) -> bool:
        """Gives each running request what the budget allows. True if somebody had to be preempted for it."""
        num_running = len(self.running)
        index = 0
        while index < len(self.running):
            request = self.running[index]
            num_tokens = self._chunk(request, plan)
            if num_tokens and not self._make_room(request, num_tokens):
                break  # it was the newest itself
            self._plan_tokens(plan, request, num_tokens)
            index += 1
        return len(self.running) < num_running

    def _chunk(self, request: RequestState, plan: StepPlan) -> int:
        """How many tokens of the request fit into what is left of the budget."""
        budget = self._facts.max_num_batched_tokens - plan.num_tokens
        if request.padding_left:
            padding = min(request.padding_left, budget)
            request.padding_left -= padding
            self._pad(plan, padding)
            budget -= padding
        return min(request.num_pending_tokens, budget)

    def _make_room(self, request: RequestState, num_tokens: int) -> bool:
        """Blocks for its next tokens, by preempting the newest requests if need be. False if that was itself."""
        while not self._tables.grow(request, request.num_computed_tokens + num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: RequestState) -> None:
        """Back to the head of the queue; what it computed is computed again, or found in the prefix cache."""
        self._leave_batch(request)
        request.num_computed_tokens = 0
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._counters.num_preemptions += 1

    def _plan_tokens(self, plan: StepPlan, request: RequestState, num_tokens: int) -> None:
        if num_tokens <= 0:
            return
        if request.num_pending_tokens == 1:
            plan.decodes.append(request)
        else:
            plan.prefills.append((request, num_tokens))
        plan.num_tokens += num_tokens
        self._tables.register(request, request.num_computed_tokens + num_tokens)

    def _pad(self, plan: StepPlan, num_tokens: int) -> None:
        plan.num_padding_tokens += num_tokens
        plan.num_tokens += num_tokens

    def _admit(self, plan: StepPlan, now: float) -> None:
        """Lets waiting requests in, in the policy's order, until places, blocks or budget end.

        A cohort (a policy without `joins`) is admitted whole, even if the budget feeds only some of it in
        this step; what does not fit into the KV cache waits for the next batch.
        """
        candidates, close_reason = self._policy.candidates(self.waiting.values(), now, self._draining)
        admitted: list[RequestState] = []
        for request in candidates:
            if not self._free_rows or (self._policy.joins and plan.num_tokens >= self._facts.max_num_batched_tokens):
                break
            if not self._reserve(request):
                close_reason = close_reason and "kv_blocks"
                break
            admitted.append(request)
            self.running.append(request)
            if not self._pads:  # padding is known only when all are in
                self._plan_tokens(plan, request, self._chunk(request, plan))
        for request in admitted:
            del self.waiting[request.request_id]
        if self._pads:
            self._pad_prompts(admitted)
            self._schedule_running(plan)
        if admitted and close_reason:
            self._close_reasons[close_reason] += 1

    def _reserve(self, request: RequestState) -> bool:
        """Takes a row and blocks for all its tokens so far (and to come, if the policy says so). False if they lack."""
        num_tokens = request.max_total_tokens if self._policy.reserves_output else len(request.token_ids)
        watermark = self._watermark_blocks if self.running and self._policy.joins else 0
        if not self._tables.reserve(request, num_tokens, watermark):
            return False
        request.row = self._free_rows.pop()
        self._counters.prefix_cache_query_tokens += len(request.token_ids) if self._prefix_caching else 0
        self._counters.prefix_cache_hit_tokens += request.num_computed_tokens
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = request.num_computed_tokens
        return True

    def _pad_prompts(self, batch: list[RequestState]) -> None:
        """Every prompt counts as long as the longest of its batch, as in a padded tensor."""
        longest = max((r.num_prompt_tokens for r in batch), default=0)
        for request in batch:
            request.padding_left = longest - request.num_prompt_tokens

    def update(self, plan: StepPlan, sampled: Sampled) -> None:
        """Takes the step's result in. Nothing was added or aborted since `schedule`."""
        receivers = plan.sampling()
        for request in plan.decodes:
            request.num_computed_tokens += 1
        for request, num_tokens in plan.prefills:
            request.num_computed_tokens += num_tokens
        logprobs = sampled.logprobs or [None] * len(receivers)
        for request, token_id, token_logprobs in zip(receivers, sampled.token_ids, logprobs, strict=True):
            self._take_token(request, token_id, token_logprobs)
        self.running = [r for r in self.running if r.finished is None]
        self._count_step(plan)
        self._release_batch()

    def _take_token(self, request: RequestState, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Appends the token and says so, now or (if the policy holds answers back) when the batch is done."""
        if token_id < 0:
            self._tables.forget(request)
            self._finish(request, FinishReason.ERROR, "the model's logits are not finite (NaN or infinity)")
            return
        if request.num_output_tokens == 0:
            self._counters.prompt_tokens += request.num_prompt_tokens
        self._counters.generation_tokens += 1
        request.token_ids.append(token_id)
        reason = request.finish_reason_after(token_id)
        if self._policy.holds_finished:
            request.hold_output(token_id, logprobs)
            if reason is not None:
                request.finished = reason
                self.held.append(request)
        elif reason is None:
            self._outputs.append(request.output([token_id], logprobs))
        else:
            self._finish(request, reason, output=request.output([token_id], logprobs))

    def _release_batch(self) -> None:
        """Answers the held requests once nobody of their batch runs any more."""
        if self.held and not self.running:
            batch, self.held = self.held, []
            for request in batch:
                assert request.finished is not None
                self._finish(request, request.finished)

    def _finish(
        self,
        request: RequestState,
        reason: FinishReason,
        message: str | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        """The request's end: its blocks are free and its last output is due. The caller takes it out of its list."""
        request.finished = reason
        del self.requests[request.request_id]
        if request.row >= 0:
            self._leave_batch(request)
        output = output or request.held_output or request.output([])
        output.finish_reason = reason
        output.message = message
        self._outputs.append(output)

    def _count_step(self, plan: StepPlan) -> None:
        counters = self._counters
        counters.num_steps += 1
        counters.step_num_seqs = len(plan.decodes) + len(plan.prefills)
        counters.step_num_tokens = plan.num_tokens
        counters.padding_tokens += plan.num_padding_tokens
        counters.kv_live_token_steps += sum(r.num_computed_tokens for r in self.running)
        num_blocks = sum(len(r.block_table) for r in self.running + self.held)
        counters.kv_allocated_token_steps += num_blocks * self._block_size

    def _leave_batch(self, request: RequestState) -> None:
        """Gives back row and blocks."""
        self._tables.release(request)
        self._free_rows.append(request.row)
        request.row = -1

    def _check(self, request: EngineRequest) -> None:
        """Refuses what could never be run. The edge checks too, and it alone looks at every token."""
        num_tokens, max_tokens = len(request.prompt_token_ids), request.sampling_params.max_tokens
        limit = self._facts.max_model_len
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        if num_tokens < 1 or max_tokens < 1:
            raise InvalidRequest("a request needs a token of prompt and one of output, at least", param="prompt")
        if num_tokens + max_tokens > limit:
            message = f"{num_tokens} tokens of prompt and {max_tokens} of output are more than the context of {limit}"
            raise InvalidRequest(message, param="max_tokens", code="context_length_exceeded")
