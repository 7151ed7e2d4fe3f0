"""Admits waiting requests to the running batch. Used by `scheduler`. Pure: no torch, no clock."""

from conveyor_engine.scheduling.adapter_slots import AdapterSlots
from conveyor_engine.scheduling.counters import Counters
from conveyor_engine.scheduling.deadlines import Deadlines
from conveyor_engine.scheduling.filling import Filling
from conveyor_engine.scheduling.meter import Meter
from conveyor_engine.scheduling.policy import NOBODY, Candidates, Policy
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.running_batch import RunningBatch
from conveyor_engine.scheduling.step import Step
from conveyor_engine.scheduling.waiting_queue import WaitingQueue


class Admission:
    """Moves requests from the waiting queue to the batch, in the policy's order."""

    def __init__(
        self,
        policy: Policy,
        batch: RunningBatch,
        waiting: WaitingQueue,
        deadlines: Deadlines,
        counters: Counters,
        meter: Meter,
        *,
        counts_prefixes: bool,
        slots: AdapterSlots | None,
    ) -> None:
        """counts_prefixes: whether requests share prefixes. slots: of their adapters; None: all are loaded."""
        self._policy, self._batch, self._waiting = policy, batch, waiting
        self._deadlines, self._counters, self._meter = deadlines, counters, meter
        self._counts_prefixes, self._slots = counts_prefixes, slots
        self._batch_time = 0.0  # when the newest closed batch started

    def admit(self, step: Step, now: float, *, draining: bool) -> bool:
        """Admit waiting requests in the policy's order until rows, blocks or budget run out.

        Returns whether blocks ran out. A closed batch (a policy without `joins`) is admitted as a whole, even if the
        budget of this step is enough only for a part of it. Requests that do not fit into the KV cache wait for the
        next batch.
        """
        candidates, close_reason = self._candidates(now, draining)
        # Whether admitted requests are scheduled later, with the whole batch.
        waits = self._policy.pads or (self._policy.keeps_together and close_reason is None)
        admitted: list[RequestState] = []
        short = False
        for request in candidates:
            if self._policy.joins and not self._batch.has_budget(step, request):
                break
            if not self._batch.admit(request, step):
                short = self._batch.num_free_rows > 0
                close_reason = close_reason and ("kv_blocks" if short else close_reason)
                break
            admitted.append(request)
            self._count(request, now)
            if not waits:
                self._batch.schedule(step, request)
        for request in admitted:
            self._waiting.pop(request)
            self._deadlines.remove(request)
        if admitted and close_reason:
            self._count_close(close_reason, admitted, now)
            self._pad_prompts(admitted)
            self._batch_time = now
        if not step.num_tokens:
            self._batch.schedule_all(step)
        return short

    def _candidates(self, now: float, draining: bool) -> Candidates:
        """Return the requests that may be admitted.

        A running closed batch admits only its own preempted requests.
        """
        if not self._policy.joins:
            if self._waiting.preempted:
                return Candidates(self._waiting.preempted, None)
            if self._batch.requests:
                return NOBODY
        return self._policy.candidates(self._waiting, now, draining)

    def _count_close(self, reason: str, batch: list[RequestState], now: float) -> None:
        filled = Filling(self._policy.limits)
        filled.extend(batch)
        first_arrival = min(request.arrival_time for request in batch)
        self._counters.count_batch(reason, filled.cost, filled.padding_share, now - first_arrival)
        self._meter.note_closed(reason, batch, now)

    def _count(self, request: RequestState, now: float) -> None:
        if self._slots is not None:
            self._slots.use(request.adapter)
        if self._counts_prefixes:
            self._counters.count_prefix(len(request.token_ids), request.num_computed_tokens)
        if not request.was_admitted:
            request.was_admitted = True
            request.scheduled_time = now
            began = now if self._policy.joins else max(request.arrival_time, self._batch_time)
            request.place_time = min(request.place_time, began)
            request.num_cached_tokens = request.num_computed_tokens

    def _pad_prompts(self, batch: list[RequestState]) -> None:
        """Pad every prompt to the longest of its batch, as in a padded tensor."""
        if self._policy.pads:
            longest = max(request.num_prompt_tokens for request in batch)
            for request in batch:
                request.num_padding_tokens = longest - request.num_prompt_tokens
