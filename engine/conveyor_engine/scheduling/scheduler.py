"""Decides, before each step, how many tokens of which request the model computes, and handles the result.

A step is {request: n_tokens} under a token budget, as in vLLM V1's scheduler. Prefill and decode are not separate
phases, except in a batch that keeps together (`policy`, which defines the batching modes). `core` calls `schedule`,
runs the plan, and calls `update` or `fail`. Pure Python, without torch and threads. `now` is an argument, and the clock
measures steps. The device gets only the numbers of a plan (`wire.step`), never a request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from conveyor_engine.config.engine_config import GUESSING, EngineConfig
from conveyor_engine.errors import InvalidRequest, Overloaded
from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.admission import Admission
from conveyor_engine.scheduling.block_manager import BlockManager
from conveyor_engine.scheduling.constrained_rows import ConstrainedRows
from conveyor_engine.scheduling.constraint import Constraint, MaskSource
from conveyor_engine.scheduling.counters import Carried, Counters
from conveyor_engine.scheduling.deadlines import Deadlines
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.meter import Meter
from conveyor_engine.scheduling.model_drafts import ModelDrafts
from conveyor_engine.scheduling.outputs import Outputs
from conveyor_engine.scheduling.policy import build_policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.running_batch import RunningBatch
from conveyor_engine.scheduling.shares import Shares
from conveyor_engine.scheduling.speculation import Speculation
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.tasks import build_task
from conveyor_engine.scheduling.waiting_queue import WaitingQueue
from conveyor_engine.text.detokenizer import Detokenizer
from conveyor_engine.text.stop_strings import StopStrings
from conveyor_engine.text.tokenizer import Tokenizer
from conveyor_engine.wire.request import EngineRequest, EngineStats, FinishReason, ModelFacts, RequestOutput
from conveyor_engine.wire.step import RowMask, StepPlan, StepResult

POLL_SECONDS = 0.05  # what waits for masks or adapters is looked at so often, in case a wake-up is lost


class Scheduler:
    """Manages the waiting queue, the running batch and the KV blocks.

    Invariants after every call: a request is either waiting, running or finished. Only running requests have blocks and
    a row. Running requests are in order of admission, and a preempted request waits at its earlier position. Every
    request that was added gets exactly one output with a finish reason.
    """

    def __init__(
        self,
        config: EngineConfig,
        facts: ModelFacts,
        tokenizer: Tokenizer | None = None,
        constrain: Callable[[EngineRequest], Constraint | None] | None = None,
        limits: Limits | None = None,
        masks: MaskSource | None = None,
        slots: AdapterSlots | None = None,
        clock: Callable[[], float] = float,
    ) -> None:
        """The tokenizer finds stop strings in the answers of batches that keep together.

        `constrain` returns the constraint on a request's tokens, or None. Without it, no request has a constraint.
        `masks` builds their masks in another process; None: constraints are always ready.
        `limits` may change between two steps. The default is the declared limits. `clock` is the one of `now`.
        `slots` has the adapters that requests may have now; None: those that were loaded at the start.
        """
        self._facts = facts
        self._tokenizer = tokenizer
        self._constrain = constrain
        self._idle_until: float | None = None  # until then at most, all rows wait for masks, or requests for adapters
        self._task = build_task(facts)
        if facts.has_states and config.batching_mode == "static":
            config = replace(config, padding="none")  # a state must not contain dummy tokens
        one_step_cost = facts.max_num_batched_tokens if self._task.whole_prompts else None
        self._limits = limits or Limits.declared(facts)
        self._policy = build_policy(config, self._limits, packs=self._task.packs, one_step_cost=one_step_cost)
        self._max_num_queued = config.max_num_queued_requests
        # Prefixes are not shared if rows are padded or have states, if there is no KV cache, or if the task computes
        # whole prompts.
        shares_none = self._task.whole_prompts or self._policy.pads or facts.has_states
        self._prefix_caching = config.prefix_caching and facts.num_kv_blocks > 0 and not shares_none
        self._counters = Counters()
        observed = 0 if config.workload is not None else facts.num_kv_blocks
        self._carried = Carried(facts.max_num_seqs, facts.num_held, observed)
        shares = Shares(config.class_shares, facts.max_num_seqs, facts.num_kv_blocks)
        self.speculation = _build_speculation(config, facts)
        self._batch = RunningBatch(
            self._policy,
            facts,
            limits=self._limits,
            shares=shares,
            prefix_caching=self._prefix_caching,
            whole_prompts=self._task.whole_prompts,
            packs=self._task.packs,
            on_preempt=self._on_preempt,
            speculation=self.speculation,
        )
        self._meter = Meter(clock, divides_by_rows=self._task.whole_prompts and not self._task.packs)
        self._outputs = Outputs(self._policy, facts, self._batch, self._counters, self._carried, self._meter)
        self._constrained = ConstrainedRows(self._batch, self._outputs, masks, has_states=facts.has_states)
        self.slots = slots
        takes = None if slots is None else slots.takes
        self.waiting = WaitingQueue(self._policy.bucket, shares, self._batch.count_reserved_blocks, takes)
        tokens_per_step = 1 if self.speculation is None else 1 + self.speculation.max_tokens
        self._deadlines, self._draining = Deadlines(tokens_per_step), False
        self._admission = Admission(
            self._policy,
            self._batch,
            self.waiting,
            self._deadlines,
            self._counters,
            self._meter,
            counts_prefixes=self._prefix_caching,
            slots=slots,
        )
        # Called after a step, with the step and the numbers of running and waiting requests.
        self.on_step: Callable[[Step, int, int], None] | None = None

    @property
    def requests(self) -> Mapping[str, RequestState]:
        """The requests that have not had their last output, by request id."""
        return self._outputs.requests

    @property
    def running(self) -> Sequence[RequestState]:
        """The admitted requests, including finished ones of a batch that keeps together."""
        return list(self._batch.requests)

    @property
    def blocks(self) -> BlockManager:
        """The pool of KV blocks."""
        return self._batch.blocks

    def add_request(self, request: EngineRequest, *, exceeds_queue: bool = False) -> None:
        """Add the request to the waiting queue. Raises Overloaded or InvalidRequest.

        Free rows of the batch count as free space in the queue. So an idle engine accepts as many requests in one burst
        as a busy engine can hold, running and waiting together.

        exceeds_queue: add it also if the queue is full.
        """
        if request.request_id in self.requests:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        self._task.check(request)  # the API process checks requests too, including every token
        self._idle_until = None
        if not exceeds_queue and len(self.waiting) >= self._max_num_queued + self._batch.num_free_rows:
            raise Overloaded(f"{len(self.waiting)} requests are waiting already; try again later")
        state = RequestState(request, self._facts.eos_token_ids)
        if self._constrain is not None and (constraint := self._constrain(request)) is not None:
            state.constraint, self._constrained.exist = constraint, True
            state.is_late = self._facts.has_states  # or its prompt might be computed twice
        expected = state.num_prompt_tokens + max(1, round(self._outputs.expected_output_tokens))
        state.expected_total_tokens = min(state.max_total_tokens, expected)
        if self._policy.joins and len(self.waiting) < self._batch.num_free_rows:
            state.place_time = state.arrival_time
        if self._policy.keeps_together and self._tokenizer is not None and state.params.stop:
            stop = StopStrings(state.params.stop)
            state.stop_strings = Detokenizer(
                self._tokenizer,
                state.token_ids,
                stop,
                state.params.min_tokens,
                skip_special_tokens=state.params.skip_special_tokens,
            )
        if not self.requests:
            self._deadlines.pace.forget_last()
        self._outputs.requests[state.request_id] = state
        self.waiting.add(state)
        self._deadlines.add(state)
        if self.slots is not None:
            self.slots.takes(state.adapter)  # so that a missing adapter is read before a row is free

    def abort(self, request_id: str) -> None:
        """End the request, waiting or running, and free its row and blocks. Unknown ids are ignored."""
        if (request := self.requests.get(request_id)) is not None:
            self._idle_until = None
            self._end(request, FinishReason.ABORT)

    def _end(self, request: RequestState, reason: FinishReason, message: str | None = None) -> None:
        """End a request, waiting or running."""
        self.waiting.remove(request)
        self._deadlines.remove(request)
        self._outputs.finish(request, reason, message)

    def drain(self) -> None:
        """Start batches without waiting until they are full, from now on."""
        self._draining, self._idle_until = True, None

    def look_again(self) -> None:
        """Schedule again: a mask that rows wait for, or an adapter, may be ready."""
        self._idle_until = None

    def fail_waiting(self, adapter: int, message: str) -> None:
        """End the waiting requests with this adapter."""
        for request in [each for each in self.waiting.in_order() if each.adapter == adapter]:
            self._end(request, FinishReason.ERROR, message)

    def has_unfinished(self) -> bool:
        """Return whether an output has not been taken, a request has not ended, or a step is open."""
        return bool(self.requests or self._outputs.pending or self._batch.has_steps)

    def next_wakeup(self, now: float) -> float | None:
        """Return when the caller must act next; None if nothing waits or runs.

        That is `now`, or a time in the future, when the first batch or deadline is due.
        """
        if self._outputs.pending or self._batch.has_steps:
            return now
        if self._idle_until is not None:
            return max(now, min(self._idle_until, self._deadlines.next_at()))
        if self._batch.requests or self.waiting.preempted:
            return now
        if not self.waiting:
            return None
        due_at = 0.0 if self._draining else self._policy.due_at(self.waiting)
        return max(now, min(due_at, self._deadlines.next_at()))

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs since the last call."""
        return self._outputs.take_outputs()

    def stats(self) -> EngineStats:
        """Return the current gauges, and counters since the start."""
        return self._counters.stats(
            num_running=len(self._batch.requests),
            num_waiting=len(self.waiting),
            kv_cache_usage=self.blocks.usage,
            num_carried=self._carried.number,
            busy_seconds=self._meter.busy_seconds,
            unclaimed_seconds=self._meter.unclaimed_seconds,
        )

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step; None if there is nothing to compute. If called again before the result, it plans ahead.

        Running requests go first, by level and then by age. Then follow waiting requests that the policy admits. A
        batch that keeps together is not planned ahead, because its next step depends on which rows have finished.
        """
        if self._policy.keeps_together and self._batch.has_steps:
            return None
        self._idle_until = None
        self._constrained.end_complete()
        self._release_batch()
        self._drop_late(now)
        step = self._batch.new_step()
        step.planned_at = now
        short = preempted = self._batch.schedule_running(step, self.waiting)
        if self.waiting and not preempted:
            short = self._admission.admit(step, now, draining=self._draining)
        self._carried.observe(now, len(self._batch.requests), self.blocks.usage, short)
        self._deadlines.pace.plan(now, planned=step.num_tokens > 0)
        self._constrained.flush()
        if self._batch.want_pictures(step) or step.num_tokens:
            return self._batch.start_step(step)
        self._release_batch()  # a finished row that was preempted has come back, with nothing to compute
        waits_for_adapters = self.slots is not None and self.slots.misses and not self._batch.requests
        if self._constrained.sleep() or waits_for_adapters:
            self._idle_until = now + POLL_SECONDS
        return None

    def _drop_late(self, now: float) -> None:
        """End waiting requests that can no longer meet their deadlines, before they take part in a step."""
        self._deadlines.pace.observe(now)
        for request, why in self._deadlines.pop_late(now):
            self.waiting.remove(request)
            self._outputs.finish(request, FinishReason.DEADLINE, why)
            self._counters.count_late()

    def _on_preempt(self, request: RequestState) -> None:
        self.waiting.add_preempted(request)
        request.num_preemptions += 1
        self._meter.note_preempted(request)
        self._counters.count_preemption()

    def is_constrained(self, plan: StepPlan) -> bool:
        """Return whether the step must wait for `build_masks` before it samples."""
        return self._constrained.need_masks(self._batch.step(plan.number))

    def build_masks(self, plan: StepPlan) -> list[RowMask]:
        """Return the allowed tokens for each constrained row of the step. All earlier steps must be over."""
        return self._constrained.build_masks(self._batch.step(plan.number))

    def update(self, result: StepResult) -> None:
        """Add the result of the oldest step to its requests, except to requests that have ended."""
        step = self._batch.end_step(result.number, result.encoded)
        step.forwards = result.forwards
        self._counters.count_step(step)
        self._meter.add_step(step)
        self._task.update(self._outputs, step, result)
        if self._facts.has_states:
            step.acquit()
            # A row that sat out would compute its last token twice.
            self._preempt([work.request for work in step.work if work.sits_out])
        self._constrained.flush()
        if num_allocated := self._batch.num_held_blocks * self._facts.block_size:
            self._counters.count_kv(self._batch.requests, num_allocated, self._facts.kv_tables)
        if self.on_step is not None and step.work:
            self.on_step(step, len(self._batch.requests), len(self.waiting))
        self._release_batch()

    def _release_batch(self) -> None:
        """Finish a batch that keeps together once none of its requests runs or is preempted."""
        if self._policy.keeps_together and not self.waiting.preempted:
            self._outputs.release_batch()

    def note_raised(self, plan: StepPlan) -> None:
        """Count the time of a step that raised, before it is planned again or fails."""
        step = self._batch.step(plan.number)
        self._meter.add_step(step)
        self._batch.note_raised(step)

    def withdraw(self, plan: StepPlan) -> None:
        """Withdraw the newest step, which will not be computed. Preempt requests that would read keys from it."""
        requests, unwritten = self._batch.undo_step(plan.number)
        self._batch.preempt_readers(unwritten)
        if self._facts.has_states:
            self._preempt(requests)

    @property
    def restarts(self) -> bool:
        """Whether a failed step's requests begin again, because their states may be those after it: see `restart`."""
        return self._facts.has_states

    def restart(self, plan: StepPlan, message: str) -> bool:
        """Preempt the requests of the only open step, which failed. They begin again, each alone.

        A request that failed alone and without drafts ends with an error. Returns False if no request still needs the
        step.
        """
        step = self._batch.step(plan.number)
        planned = [work.request for work in step.work]
        self._batch.undo_step(plan.number)
        requests = [r for r in planned if self.requests.get(r.request_id) is r and r.finished is None]
        if len(planned) == 1 and requests and not step.has_drafts:
            self._end(requests[0], FinishReason.ERROR, message)
            return True
        self._preempt(requests)
        for request in requests:
            request.num_failed_tokens = request.num_input_tokens
        return bool(requests)

    def _preempt(self, requests: list[RequestState]) -> None:
        for request in reversed(requests):
            if request.row >= 0 and request.finished is None:
                self._batch.preempt(request)

    def halve(self, plan: StepPlan) -> Iterator[StepPlan]:
        """Plan the only open step again, which failed: first the older half of its requests, then the newer half."""
        return self._batch.halve_step(plan.number)

    def fail(self, plan: StepPlan, message: str) -> None:
        """End the requests of the only open step, which failed, with an error. Finished rows keep their outputs.

        Requests that would read keys which the step has not written are preempted.
        """
        requests, unwritten = self._batch.undo_step(plan.number)
        for request in requests:
            if request.finished is None:
                self._outputs.finish(request, FinishReason.ERROR, message)
            else:
                self._batch.retire(request)
        self._batch.preempt_readers(unwritten)

    def dummy_plan(self) -> AbstractContextManager[StepPlan]:
        """Return a context with a plan of one dummy token. It uses a row and a block that `fail` has freed."""
        return self._batch.plan_alone(RequestState(self._task.build_dummy(0, 1), ()))


def _build_speculation(config: EngineConfig, facts: ModelFacts) -> Speculation | ModelDrafts | None:
    if config.speculation is None:
        return None
    if config.speculation in GUESSING:
        return ModelDrafts(config.speculation_tokens, facts.block_size, facts.draft_lag, facts.has_states)
    return Speculation(config.speculation_tokens, facts.has_states)
