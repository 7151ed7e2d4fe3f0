"""The four batching modes as policies of one scheduler.

A policy decides: when a batch is full (`limits`), which requests a batch prefers (`bucket`), when a batch may start
and with which requests (`candidates`, `due_at`), whether requests may join a running batch (`joins`), whether a batch's
answers are returned together (`keeps_together`), and whether its rows are padded to one length (`pads`).

The modes differ only in these decisions. The order of the requests is the same in all modes (`waiting_queue`), and so
is the rest of the scheduler (token budget, chunked prefill, blocks). The design follows TensorRT-LLM's capacity
policies and Triton's queue policies.
"""

import math
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.filling import BatchLimits, Filling
from conveyor_engine.scheduling.limits import Limits
from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.waiting_queue import Bucket, WaitingQueue

STATIC_WINDOW_SECONDS = 1.0  # for offline work, which can wait for a full batch
DYNAMIC_WINDOW_SECONDS = 0.010  # for interactive clients; the default of Ray Serve


class Candidates(NamedTuple):
    """The requests that may be admitted now, in this order, and why their batch closed; None if no batch closes now."""

    requests: Iterable[RequestState]
    close_reason: str | None


NOBODY = Candidates((), None)


class Policy(Protocol):
    """The decisions that define a batching mode."""

    limits: BatchLimits
    joins: bool  # whether requests may join while others run
    # Whether prompts come before all decodes, and finished requests stay in the batch, with their answers held back,
    # until all are done.
    keeps_together: bool
    pads: bool  # rows are padded to the longest prompt, and finished rows continue, as in a padded tensor

    def bucket(self, request: RequestState) -> int:
        """Return the request's bucket. Requests of one bucket fit together well, so a batch prefers one bucket."""
        ...

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        """Return the requests that may be admitted now.

        Without `joins`, this is called only while no request runs and no preempted one has to resume.
        """
        ...

    def due_at(self, waiting: WaitingQueue) -> float:
        """Return when `candidates` will return a request if no other request arrives. `waiting` must not be empty."""
        ...


class _Immediate:
    """Starts as soon as a request waits."""

    keeps_together = False
    pads = False

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits

    def bucket(self, request: RequestState) -> int:
        return 0

    def due_at(self, waiting: WaitingQueue) -> float:
        return 0.0


class Continuous(_Immediate):
    """Iteration-level scheduling (Orca, OSDI'22): requests join at every step, and leave as soon as they are done."""

    joins = True

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        return Candidates(waiting, None)


class NoBatching(_Immediate):
    """One request at a time, in order."""

    joins = False

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        return Candidates(islice(waiting, 1), "full") if len(waiting) else NOBODY


class _Closed:
    """Starts a batch when it is full, or when the window that began with its first request ends.

    With grouping, a batch is filled first with requests of one bucket: pictures of one size, or requests whose expected
    lengths lie between the same powers of two. The window limits grouping. In the queue's order, the next bucket is the
    first one that is full, or that has a request whose window is over. If this bucket leaves rows free, other requests
    follow in the queue's order, up to the last one whose window is over. So a request whose window is over misses a
    batch only if this bucket and the requests ahead of it fill the batch. An eager policy starts a batch as soon as a
    request waits and no batch runs.
    """

    joins = False
    keeps_together = False

    def __init__(
        self,
        limits: BatchLimits,
        window_seconds: float,
        *,
        pads: bool = False,
        groups: bool = True,
        lengths: bool = True,
        eager: bool = False,
    ) -> None:
        """`groups`: whether batches prefer one bucket. `lengths`: whether requests are put into buckets by length."""
        self.limits, self.pads = limits, pads
        self._window_seconds = window_seconds
        self._groups, self._lengths = groups, groups and lengths
        self._eager = eager

    def bucket(self, request: RequestState) -> int:
        if request.group and self._groups:
            return request.group
        return (request.expected_total_tokens + request.payload_cost).bit_length() if self._lengths else 0

    def candidates(self, waiting: WaitingQueue, now: float, draining: bool) -> Candidates:
        for bucket in waiting.buckets:
            listing = waiting.new_listing()
            batch = Filling(self.limits)
            batch.extend(bucket.fitting(listing))
            reason = batch.full or self._why_now(bucket, now, draining)
            if reason is not None and batch.requests:
                if not batch.full:
                    others = islice(waiting.fitting_others(bucket, listing), batch.num_free_rows)
                    batch.extend(self._until_last_due(list(others), now, draining))
                return Candidates(batch.requests, reason)
        return NOBODY

    def _why_now(self, bucket: Bucket, now: float, draining: bool) -> str | None:
        """Return why a batch of the bucket starts although it is not full; None if it does not start."""
        if draining:
            return "drain"
        if now >= self._window_end(bucket):
            return "window"
        return "eager" if self._eager else None

    def _until_last_due(self, others: list[RequestState], now: float, draining: bool) -> list[RequestState]:
        """Return the `others` up to the last one whose window is over; all of them while draining."""
        end = len(others)
        while end and not draining and now < others[end - 1].arrival_time + self._window_seconds:
            end -= 1
        return others[:end]

    def due_at(self, waiting: WaitingQueue) -> float:
        if self._eager:
            return 0.0
        return min(0.0 if self._is_full(bucket) else self._window_end(bucket) for bucket in waiting.buckets)

    def _window_end(self, bucket: Bucket) -> float:
        return bucket.first_arrival_time + self._window_seconds

    def _is_full(self, bucket: Bucket) -> bool:
        if len(bucket) < self.limits.num_rows and self.limits.cost == math.inf:
            return False
        batch = Filling(self.limits)
        batch.extend(bucket)
        return batch.full is not None


class Static(_Closed):
    """Starts when a batch is full, or when its first request's window ends. All its answers are returned together."""

    keeps_together = True


class Dynamic(_Closed):
    """Starts when a batch is full, or when its first request's window ends. Each answer is returned when it is done."""


def build_policy(
    config: EngineConfig, limits: Limits, *, packs: bool = False, one_step_cost: int | None = None
) -> Policy:
    """Build the policy of `config.batching_mode`, in which `__main__` has replaced `auto` by the task's own mode.

    packs: whether a batch costs the sum of its requests, however their lengths differ. one_step_cost: the largest cost
    of a step, for tasks that never split a prompt (`tasks.Task`). A batch with a larger cost would take several steps.
    """
    pads = config.batching_mode == "static" and config.padding != "none" and one_step_cost is None
    cost = one_step_cost or config.max_num_batched_tokens or math.inf
    batch = BatchLimits(limits, cost, padded=pads or (one_step_cost is not None and not packs))
    window, eager = config.batching_window_seconds, config.batching_eager
    groups, lengths = config.length_grouping == "auto", not packs
    match config.batching_mode:
        case "none":
            return NoBatching(batch)
        case "static":
            seconds = STATIC_WINDOW_SECONDS if window is None else window
            return Static(batch, seconds, pads=pads, groups=groups, lengths=lengths, eager=eager)
        case "dynamic":
            seconds = DYNAMIC_WINDOW_SECONDS if window is None else window
            return Dynamic(batch, seconds, groups=groups, lengths=lengths, eager=eager)
        case "continuous" | "auto":
            return Continuous(batch)
