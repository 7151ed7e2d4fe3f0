"""The four batching systems as policies of one scheduler.

A policy answers five questions: who may be in one batch (`bucket`), when may it start and with whom (`candidates`,
`due_at`), may others join it (`joins`), do its rows keep together (`keeps_together`), are they padded to one length
(`pads`). Whose turn it is, is not among them: `waiting_queue`.
Everything else (token budget, chunked prefill, blocks) is the scheduler's and shared, so that
the modes differ in nothing but these answers. After TensorRT-LLM's capacity policies and Triton's queue policies.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.waiting_queue import Bucket, WaitingQueue

STATIC_WINDOW_SECONDS = 1.0  # offline work: worth waiting for a full batch
DYNAMIC_WINDOW_SECONDS = 0.010  # for interactive clients; the default of Ray Serve


class Candidates(NamedTuple):
    """Who may be admitted now, in this order, and why the batch closed (None: batches never close)."""

    requests: Iterable[RequestState]
    close_reason: str | None


NOBODY = Candidates((), None)


class Policy(Protocol):
    """The answers that make a batching mode."""

    joins: bool  # requests may join while others run
    keeps_together: bool  # all prompts before any decode; a finished row keeps place and answer until all are done
    pads: bool  # computes every row as long as the longest prompt, and finished ones on, as a padded tensor does

    def bucket(self, request: RequestState) -> int:
        """Requests of different buckets are never in one batch."""
        ...

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        """Who may be admitted now. Unless `joins`, asked only when nothing runs and nobody is to come back."""
        ...

    def due_at(self, waiting: WaitingQueue) -> float:
        """When `candidates` will return a request, if none arrives before. `waiting` is not empty."""
        ...


class _Immediate:
    """Starts as soon as a request waits."""

    keeps_together = False
    pads = False

    def bucket(self, request: RequestState) -> int:
        return 0

    def due_at(self, waiting: WaitingQueue) -> float:
        return 0.0


class Continuous(_Immediate):
    """Iteration-level scheduling (Orca, OSDI'22): join at every step, leave at once."""

    joins = True

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        return Candidates(waiting, None)


class NoBatching(_Immediate):
    """One request at a time, in order."""

    joins = False

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        return Candidates(islice(waiting, 1), "full") if len(waiting) else NOBODY


class _Closed:
    """Starts when a batch is full, or when the window since the first that could run ends.

    Each bucket has its own window; of those due, the one of the party that has waited longest for a turn goes first, so
    nobody starves. A batch is full too when the next prompt would bring the sum of its prompts above the limit.
    """

    joins = False

    def __init__(self, max_num_seqs: int, window_seconds: float, max_batch_tokens: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = math.inf if max_batch_tokens is None else max_batch_tokens
        self._window_seconds = window_seconds

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        for bucket in waiting.buckets:
            batch, reason = self._fill(bucket)
            if reason is None and draining:
                reason = "drain"
            elif reason is None and now >= self._window_end(bucket):
                reason = "window"
            if reason is not None:
                return Candidates(batch, reason)
        return NOBODY

    def due_at(self, waiting: WaitingQueue) -> float:
        return min(0.0 if self._fill(bucket)[1] else self._window_end(bucket) for bucket in waiting.buckets)

    def _window_end(self, bucket: Bucket) -> float:
        return bucket.first_arrival_time + self._window_seconds

    def _fill(self, bucket: Bucket) -> tuple[list[RequestState], str | None]:
        """The bucket's next batch, and why it takes no more; None if it does."""
        batch: list[RequestState] = []
        num_tokens = 0
        for request in bucket:
            num_tokens += request.prompt_cost
            if batch and num_tokens > self._max_batch_tokens:
                return batch, "tokens"
            batch.append(request)
            if len(batch) == self._max_num_seqs:
                return batch, "full"
        return batch, None


class Static(_Closed):
    """Waits for a full batch or the time-out since the first request; all answers leave together."""

    keeps_together = True

    def __init__(self, max_num_seqs: int, window_seconds: float, *, pads: bool) -> None:
        super().__init__(max_num_seqs, window_seconds)
        self.pads = pads

    def bucket(self, request: RequestState) -> int:
        return 0


class Dynamic(_Closed):
    """Starts when a batch is full or when the window since its first request ends; batches by length, if it groups.

    A bucket holds the requests whose expected lengths lie between the same powers of two, so that the slowest
    row of a batch takes about twice as long as any other, at most.
    """

    keeps_together = False
    pads = False

    def __init__(
        self, max_num_seqs: int, window_seconds: float, max_batch_tokens: int | None = None, *, groups: bool = True
    ) -> None:
        super().__init__(max_num_seqs, window_seconds, max_batch_tokens)
        self._groups = groups

    def bucket(self, request: RequestState) -> int:
        return 0 if not self._groups else (request.expected_total_tokens + request.payload_cost).bit_length()


def build_policy(config: EngineConfig, *, groups: bool = True) -> Policy:
    """The policy of `config.batching_mode`; `__main__` puts the task's own in the place of `auto`.

    groups: whether lengths of one batch should be alike, where the mode cares for it.
    """
    window = config.batching_window_seconds
    match config.batching_mode:
        case "none":
            return NoBatching()
        case "static":
            seconds = STATIC_WINDOW_SECONDS if window is None else window
            return Static(config.max_num_seqs, seconds, pads=config.padding != "none")
        case "dynamic":
            seconds = DYNAMIC_WINDOW_SECONDS if window is None else window
            return Dynamic(config.max_num_seqs, seconds, config.max_num_batched_tokens, groups=groups)
        case "continuous" | "auto":
            return Continuous()
