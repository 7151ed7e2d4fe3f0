"""The outputs of requests: the results of each step, and the last outputs. Used by `scheduler` and `tasks`.

In a batch that keeps together, outputs are held back until all rows are done. A finished row may continue as padding.
"""

from collections.abc import Sequence

from conveyor_engine.scheduling.counters import Carried, Counters
from conveyor_engine.scheduling.meter import Meter
from conveyor_engine.scheduling.policy import Policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.running_batch import RunningBatch
from conveyor_engine.scheduling.step import Work
from conveyor_engine.wire.request import FinishReason, ModelFacts, RequestOutput, TokenLogprobs
from conveyor_engine.wire.step import NOTHING_ALLOWED

EXPECTED_OUTPUT_TOKENS = 256.0  # estimate of an answer's length before any answer has ended
_ESTIMATE_WEIGHT = 1 / 32  # weight of each ended answer in this estimate
_NOTHING_ALLOWED = (
    "no token is allowed next: the request's structured output, allowed_token_ids, bad_words and min_tokens"
    " together forbid all tokens"
)


class Outputs:
    """The requests that have not had their last output, and the outputs that `take_outputs` has not returned yet."""

    def __init__(
        self,
        policy: Policy,
        facts: ModelFacts,
        batch: RunningBatch,
        counters: Counters,
        carried: Carried,
        meter: Meter,
    ) -> None:
        self._policy = policy
        self._facts = facts
        self._batch = batch
        self._counters = counters
        self._carried = carried
        self._meter = meter
        self.requests: dict[str, RequestState] = {}
        self.pending: list[RequestOutput] = []
        self.expected_output_tokens = EXPECTED_OUTPUT_TOKENS

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs since the last call."""
        outputs, self.pending = self.pending, []
        return outputs

    def add_token(
        self,
        work: Work,
        token_id: int | None,
        logprobs: Sequence[TokenLogprobs] | None,
        payload: bytes | None = None,
    ) -> None:
        """Record that a step of the request is computed, and add the token that it sampled.

        token_id: None if no token was sampled. payload: a payload for the request's output; None: no payload.
        """
        request = work.request
        request.num_computed_tokens += work.num_tokens
        request.num_awaited_tokens -= work.num_logits
        if request.padded_from is not None and request.num_pending_tokens == 1:
            request.unpad()
        if token_id is None:
            return
        if request.finished is None:
            self._append_token(request, token_id, logprobs, payload)
        else:
            self._append_dummy(request, token_id)

    def add_tokens(self, work: Work, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None) -> None:
        """Record that a step of the request and its drafts is computed, and add the tokens that it sampled.

        The drafts after the last of these tokens are computed again, or others in their place. If layers keep states
        and a draft was rejected, the states are those before the step. So its tokens are computed again.
        """
        request = work.request
        num_computed = request.num_computed_tokens
        drafter, num_drafts, num_accepted = request.drafter, work.num_tokens - 1, len(token_ids) - 1
        request.num_awaited_tokens -= work.num_logits
        request.num_scheduled_tokens -= work.num_tokens - len(token_ids)
        self._counters.count_drafts(num_drafts)
        if drafter is not None:
            drafter.count(0, num_drafts)
        for index, token_id in enumerate(token_ids):
            request.num_computed_tokens += 1
            if index < num_accepted:
                self._counters.count_accepted()
                if drafter is not None:
                    drafter.count(1, -1)
            self._append_token(request, token_id, None if logprobs is None else logprobs[index : index + 1], None)
            if request.finished is not None:
                return
        if self._facts.has_states and len(token_ids) < work.num_tokens:
            request.num_computed_tokens = request.num_scheduled_tokens = num_computed

    def add_scores(self, request: RequestState, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add the log probabilities of the next tokens of the request's prompt. Every mode sends them at once."""
        request.num_scored_tokens += len(logprobs)
        output = request.output([])
        output.prompt_logprobs = list(logprobs)
        self.pending.append(output)

    def add_progress(self, work: Work, payload: bytes) -> None:
        """Record that a step of a request with several steps is computed, and send its preview, if there is one.

        payload: the preview; empty: no preview. In a batch that keeps together, previews are not sent at all.
        """
        work.request.num_computed_tokens += work.num_tokens
        if payload and not self._policy.keeps_together:
            output = work.request.output([])
            output.payload = payload
            self.pending.append(output)

    def add_payload(self, work: Work, payload: bytes, error: str) -> None:
        """End the request with this payload as its output, or with the `error` if the payload is empty."""
        request = work.request
        request.num_computed_tokens += work.num_tokens
        request.num_awaited_tokens -= work.num_logits
        if not payload:
            self.finish(request, FinishReason.ERROR, error)
            return
        self._counters.count_prompt(request)
        output = request.output([])
        output.payload = payload
        if self._policy.keeps_together:
            request.held_output, request.finished = output, FinishReason.STOP
        else:
            self.finish(request, FinishReason.STOP, output=output)

    def _append_token(
        self,
        request: RequestState,
        token_id: int,
        logprobs: Sequence[TokenLogprobs] | None,
        payload: bytes | None,
    ) -> None:
        """Append the token, and end the request if it is the last one. A batch that keeps together holds it back."""
        if token_id < 0:
            self._fail(request, nothing_allowed=token_id == NOTHING_ALLOWED)
            return
        if request.num_output_tokens == 0:
            self._counters.count_prompt(request)
            self._meter.note_first_token(request)
        reason = request.append(token_id)
        self._counters.count_generated(1)
        if reason is not None:
            self._learn_length(request)
        output = request.output([token_id], None if logprobs is None else list(logprobs))
        output.payload = payload
        if self._policy.keeps_together:
            request.hold_output(output)
            if reason is not None:
                self._hold_back(request, reason)
            if request.num_padding_tokens and request.num_output_tokens == 1:
                request.pad()
        elif reason is None:
            self.pending.append(output)
        else:
            self.finish(request, reason, output=output)

    def end_late(self, request: RequestState, reason: FinishReason) -> None:
        """End a request after its last token was added, with an output of no tokens."""
        self._learn_length(request)
        if self._policy.keeps_together:
            self._hold_back(request, reason)
        else:
            self.finish(request, reason)

    def _hold_back(self, request: RequestState, reason: FinishReason) -> None:
        """Note that the answer is complete. It is returned with those of the whole batch."""
        request.finished = reason
        self._meter.note_finished(request)

    def _learn_length(self, request: RequestState) -> None:
        error = request.num_output_tokens - self.expected_output_tokens
        self.expected_output_tokens += error * _ESTIMATE_WEIGHT
        num_shared_blocks = request.num_cached_tokens // self._facts.block_size
        self._carried.learn(request.num_blocks - num_shared_blocks * self._facts.kv_tables.full)

    def _fail(self, request: RequestState, *, nothing_allowed: bool) -> None:
        if nothing_allowed:
            self.finish(request, FinishReason.FORBIDDEN, _NOTHING_ALLOWED)
            return
        self._batch.evict(request)
        self.finish(request, FinishReason.ERROR, "the model's logits are not finite (NaN or infinity)")

    def _append_dummy(self, request: RequestState, token_id: int) -> None:
        """Let a finished row of a padded batch continue in the next step.

        The sampled token becomes its next dummy token. At `max_model_len` it computes its last token again instead.
        """
        if len(request.token_ids) < self._facts.max_model_len:
            request.token_ids.append(max(0, token_id))
        else:
            request.rewind(request.num_computed_tokens - 1)

    def release_batch(self) -> None:
        """Finish the requests of a batch that keeps together, once none of them runs any more."""
        if all(r.finished is not None and r.padded_from is None for r in self._batch.requests):
            for request in list(self._batch.requests):
                assert request.finished is not None
                self.finish(request, request.finished)

    def finish(
        self,
        request: RequestState,
        reason: FinishReason,
        message: str | None = None,
        output: RequestOutput | None = None,
    ) -> None:
        """End a request that is not waiting: remove it from the batch, if it is there, and add its last output."""
        request.finished = reason
        del self.requests[request.request_id]
        self._batch.free(request)
        output = output or request.held_output or request.output([])
        output.finish_reason = reason
        output.message = message
        output.receipt = self._meter.close(request)
        self.pending.append(output)
