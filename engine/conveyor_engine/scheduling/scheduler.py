"""Decides, before each step, how many tokens of which request the model computes; and what follows from the result.

A step is {request: n_tokens} under a token budget; there are no prefill and decode phases (vLLM V1's
scheduler) but in a batch that keeps together. `core` calls `schedule`, has the plan run and calls `update`, or `fail`;
`policy` makes the batching mode. Pure Python: knows neither torch nor threads nor the clock (`now` is an argument).
Whoever runs a plan sees its numbers only (`wire.step`), never a request.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.counters import Counters
from conveyor_engine.scheduling.policy import NOBODY, Candidates, build_policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.running_batch import RunningBatch
from conveyor_engine.scheduling.step import Step
from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import (
    EngineRequest,
    EngineStats,
    FinishReason,
    ModelFacts,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from conveyor_engine.wire.step import StepPlan, StepResult

EXPECTED_OUTPUT_TOKENS = 256.0  # of an answer, before any was seen ...
_ESTIMATE_WEIGHT = 1 / 32  # ... and how much each one that ends counts


class Scheduler:
    """Waiting queue, running batch, KV blocks.

    Invariants, after every call: a request is in exactly one of waiting, running or gone; only running ones hold
    blocks and a row; running is in order of admission, and preempted ones are the head of waiting, oldest first;
    every request that was added gets exactly one output with a finish reason.
    """

    def __init__(self, config: EngineConfig, facts: ModelFacts, tokenizer: Tokenizer | None = None) -> None:
        """The tokenizer finds stop strings in the answers of batches that keep together."""
        self._facts = facts
        self._tokenizer = tokenizer
        self._policy = build_policy(config)
        self._max_num_queued = config.max_num_queued_requests
        self._prefix_caching = config.prefix_caching and not self._policy.pads  # a padded tensor shares nothing
        self._batch = RunningBatch(
            self._policy, facts, prefix_caching=self._prefix_caching, on_preempt=self._wait_to_come_back
        )
        self._tables = self._batch.tables
        self.requests: dict[str, RequestState] = {}
        self.waiting: OrderedDict[str, RequestState] = OrderedDict()
        self._num_planned = 0  # steps
        self._steps: dict[int, Step] = {}  # by number: planned, and not come to an end
        self._outputs: list[RequestOutput] = []
        self._draining = False
        self._expected_output_tokens = EXPECTED_OUTPUT_TOKENS
        self._counters = Counters()

    @property
    def running(self) -> Sequence[RequestState]:
        """The admitted requests; where a batch keeps together, its finished ones too."""
        return self._batch.requests

    @property
    def blocks(self) -> BlockManager:
        """The pool of KV blocks."""
        return self._batch.blocks

    def add_request(self, request: EngineRequest) -> None:
        """Appends to the waiting queue. Raises Overloaded or InvalidRequest.

        Free places of the batch add room: an idle engine takes as long a burst as a busy one holds.
        """
        self._check(request)
        if len(self.waiting) >= self._max_num_queued + len(self._tables.free_rows):
            raise Overloaded(f"{len(self.waiting)} requests are waiting already; try again later")
        state = RequestState(request, self._facts.eos_token_ids)
        expected = state.num_prompt_tokens + max(1, round(self._expected_output_tokens))
        state.expected_total_tokens = min(state.max_total_tokens, expected)
        if self._policy.keeps_together and self._tokenizer is not None and state.params.stop:
            stop = StopStrings(state.params.stop)
            state.stop_strings = Detokenizer(self._tokenizer, state.token_ids, stop, state.params.min_tokens)
        self.requests[state.request_id] = state
        self.waiting[state.request_id] = state

    def abort(self, request_id: str) -> None:
        """Ends the request wherever it is and frees what it holds. Unknown ids are ignored. Not while a step runs."""
        request = self.requests.get(request_id)
        if request is None:
            return
        if request_id in self.waiting:
            del self.waiting[request_id]
        else:
            self._batch.requests.remove(request)
        self._finish(request, FinishReason.ABORT)

    def drain(self) -> None:
        """Batches no longer wait to fill."""
        self._draining = True

    def has_unfinished(self) -> bool:
        """Whether some request has not had its last output taken."""
        return bool(self.requests or self._outputs)

    def next_wakeup(self, now: float) -> float | None:
        """When the next `schedule` has something to do: now, a later time, or None."""
        if self.running or self._outputs or self._preempted():
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
        return self._counters.stats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            kv_cache_usage=1 - self.blocks.num_free / self.blocks.num_blocks,
        )

    def schedule(self, now: float) -> StepPlan | None:
        """The next step, or None if there is nothing to compute; `update` or `fail` is called before the next one.

        Running requests go first, oldest first; then waiting ones, as the policy lets them in.
        """
        self._release_batch()
        step = Step(self._num_planned)
        preempted = self._batch.plan_step(step, self.waiting.values())
        if self.waiting and not preempted:
            self._admit(step, now)
        return self._plan(step) if step.num_tokens else None

    def _plan(self, step: Step) -> StepPlan:
        self._num_planned += 1
        self._steps[step.number] = step
        return step.plan()

    def _wait_to_come_back(self, request: RequestState) -> None:
        """At the head of the queue."""
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)
        self._counters.count_preemption()

    def _preempted(self) -> list[RequestState]:
        """The waiting requests that have run before."""
        return list(takewhile(lambda request: request.preempted, self.waiting.values()))

    def _candidates(self, now: float) -> Candidates:
        """Who may be admitted. Those preempted from a closed batch come back before it is over; nobody joins it."""
        if not self._policy.joins:
            if preempted := self._preempted():
                return Candidates(preempted, None)
            if self.running:
                return NOBODY
        return self._policy.candidates(self.waiting.values(), now, self._draining)

    def _admit(self, step: Step, now: float) -> None:
        """Lets waiting requests in, in the policy's order, until places, blocks or budget end.

        A closed batch (a policy without `joins`) is admitted whole, even if the budget feeds only some of it in
        this step; what does not fit into the KV cache waits for the next batch.
        """
        candidates, close_reason = self._candidates(now)
        waits = self._policy.pads or (self._policy.keeps_together and close_reason is None)  # for its turn in the batch
        admitted: list[RequestState] = []
        for request in candidates:
            if self._policy.joins and not self._batch.has_budget(step):
                break
            if not self._batch.admit(request, step):
                close_reason = close_reason and ("kv_blocks" if self._tables.free_rows else close_reason)
                break
            admitted.append(request)
            self._note_prefix_hits(request)
            if not waits:
                self._batch.feed(step, request)
        for request in admitted:
            del self.waiting[request.request_id]
        if admitted and close_reason:
            self._counters.count_close(close_reason)
            self._pad_prompts(admitted)
        if not step.num_tokens:
            self._batch.feed_all(step)

    def _note_prefix_hits(self, request: RequestState) -> None:
        if self._prefix_caching:
            self._counters.count_prefix(len(request.token_ids), request.num_computed_tokens)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached_tokens = request.num_computed_tokens

    def _pad_prompts(self, batch: list[RequestState]) -> None:
        """Every prompt is as long as the longest of its batch, as in a padded tensor."""
        if self._policy.pads:
            longest = max(request.num_prompt_tokens for request in batch)
            for request in batch:
                request.num_padding_tokens = longest - request.num_prompt_tokens

    def update(self, result: StepResult) -> None:
        """Takes the step's result in. Nothing was added or aborted since `schedule`."""
        step = self._steps.pop(result.number)
        receivers = step.sampling()
        self._counters.count_step(step)
        for request, num_tokens in step.work():
            request.num_computed_tokens += num_tokens
            if request.padded_from is not None and request.num_pending_tokens == 1:
                request.unpad()
        logprobs = result.logprobs or [None] * len(receivers)
        for request, token_ids, token_logprobs in zip(receivers, result.token_ids, logprobs, strict=True):
            if request.finished is None:
                self._take_tokens(request, token_ids, token_logprobs)
            else:
                self._go_on_padding(request, token_ids)
        self._drop_ended()
        self._counters.count_kv(self.running, self._facts.block_size)
        self._release_batch()

    def _take_tokens(
        self, request: RequestState, token_ids: list[int], logprobs: Sequence[TokenLogprobs] | None
    ) -> None:
        """Appends the tokens up to the one that ends the request. Where a batch keeps together, its end tells them."""
        if token_ids and min(token_ids) < 0:
            self._tables.forget(request)
            self._finish(request, FinishReason.ERROR, "the model's logits are not finite (NaN or infinity)")
            return
        if request.num_output_tokens == 0:
            self._counters.count_prompt(request.num_prompt_tokens)
        token_ids, reason = request.append(token_ids)
        self._counters.count_generated(len(token_ids))
        if reason is not None:
            error = request.num_output_tokens - self._expected_output_tokens
            self._expected_output_tokens += error * _ESTIMATE_WEIGHT
        kept_logprobs = None if logprobs is None else list(logprobs[: len(token_ids)])
        if self._policy.keeps_together:
            request.hold_output(token_ids, kept_logprobs)
            request.finished = reason
            if request.num_padding_tokens and request.num_output_tokens == 1:
                request.pad()
        elif reason is None:
            self._outputs.append(request.output(token_ids, kept_logprobs))
        else:
            self._finish(request, reason, output=request.output(token_ids, kept_logprobs))

    def _go_on_padding(self, request: RequestState, token_ids: list[int]) -> None:
        """A finished row of a padded batch takes part in every step, a token longer each time while there is room.

        What it samples is its next dummy token.
        """
        if len(request.token_ids) < self._facts.max_model_len:
            request.token_ids.append(max(0, token_ids[0]))
        else:
            request.num_computed_tokens -= 1

    def _release_batch(self) -> None:
        """Answers a batch that keeps together once nobody of it runs any more."""
        if not self._policy.keeps_together or self._preempted():
            return
        if all(r.finished is not None and r.padded_from is None for r in self.running):
            for request in self.running:
                assert request.finished is not None
                self._finish(request, request.finished)
            self._drop_ended()

    def _drop_ended(self) -> None:
        self._batch.requests = [r for r in self.running if r.request_id in self.requests]

    def halve(self, plan: StepPlan) -> Iterator[StepPlan]:
        """In place of a plan that could not be computed: the older half of its requests, and then the newer one.

        The executor is told each of their rows whole, for nobody knows how far it came. Whoever has left the batch
        meanwhile is in neither half.
        """
        for work in self._steps.pop(plan.number).split():
            step = Step(self._num_planned)
            for request, num_tokens in work:
                if request.row >= 0:
                    request.num_sent_blocks = -1
                    step.add(request, num_tokens)
            if step.num_tokens:
                yield self._plan(step)

    def fail(self, plan: StepPlan, message: str) -> None:
        """The step could not be computed: its requests end, but finished rows keep their answers.

        Whoever counts on keys that they did not write starts anew.
        """
        failed = [request for request, _ in self._steps.pop(plan.number).work()]
        unwritten = set[int]().union(*(self._tables.unschedule(request) for request in failed))
        for request in failed:
            if request.finished is None:
                self._finish(request, FinishReason.ERROR, message)
            else:
                self._batch.retire(request)
        self._drop_ended()
        self._batch.preempt_readers(unwritten)

    @contextmanager
    def lend(self) -> Iterator[StepPlan]:
        """A plan of one harmless token, on a row and a block that nobody has. After `fail`, so that there are some."""
        params = SamplingParams(max_tokens=1, temperature=0.0)
        request = RequestState(EngineRequest(request_id="", prompt_token_ids=[0], sampling_params=params), ())
        with self._batch.lend(request):
            step = Step(self._num_planned)
            step.add(request, 1)
            yield step.plan()

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
            self._tables.release(request)
        output = output or request.held_output or request.output([])
        output.finish_reason = reason
        output.message = message
        self._outputs.append(output)

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
