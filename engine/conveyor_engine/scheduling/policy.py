"""The four batching systems as policies of one scheduler.

A policy answers four questions: when may a batch start and with whom (`candidates`, `due_at`), may others join it
(`joins`), do its rows keep together (`keeps_together`), are they padded to one length (`pads`).
Everything else (token budget, chunked prefill, blocks) is the scheduler's and shared, so that
the modes differ in nothing but these answers. After TensorRT-LLM's capacity policies and Triton's queue policies.
"""

import math
from collections.abc import Collection, Iterable
from typing import NamedTuple, Protocol

from conveyor_engine.config.engine_config import EngineConfig
from conveyor_engine.scheduling.request_state import RequestState

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

    def candidates(self, waiting: Collection[RequestState], now: float, draining: bool) -> Candidates:
        """Who may be admitted now. Unless `joins`, asked only when nothing runs. `waiting` is in FIFO order."""
        ...

    def due_at(self, waiting: Collection[RequestState]) -> float:
        """When `candidates` will return a request, if none arrives before. `waiting` is not empty."""
        ...


class Continuous:
    """Iteration-level scheduling (Orca, OSDI'22): join at every step, leave at once."""

    joins = True
    keeps_together = False
    pads = False

    def candidates(self, waiting: Collection[RequestState], now: float, draining: bool) -> Candidates:
        return Candidates(waiting, None)

    def due_at(self, waiting: Collection[RequestState]) -> float:
        return 0.0


class NoBatching:
    """One request at a time, in order."""

    joins = False
    keeps_together = False
    pads = False

    def candidates(self, waiting: Collection[RequestState], now: float, draining: bool) -> Candidates:
        return Candidates([next(iter(waiting))], "full") if waiting else NOBODY

    def due_at(self, waiting: Collection[RequestState]) -> float:
        return 0.0


class Static:
    """Waits for a full batch or the time-out since the first request; all answers leave together."""

    joins = False
    keeps_together = True

    def __init__(self, max_num_seqs: int, window_seconds: float, *, pads: bool) -> None:
        self.pads = pads
        self._max_num_seqs = max_num_seqs
        self._window_seconds = window_seconds

    def candidates(self, waiting: Collection[RequestState], now: float, draining: bool) -> Candidates:
        if len(waiting) >= self._max_num_seqs:
            return Candidates(waiting, "full")
        if waiting and (draining or now >= self.due_at(waiting)):
            return Candidates(waiting, "drain" if draining else "window")
        return NOBODY

    def due_at(self, waiting: Collection[RequestState]) -> float:
        if len(waiting) >= self._max_num_seqs:
            return 0.0
        return next(iter(waiting)).arrival_time + self._window_seconds


class _Group:
    """Waiting requests of similar length, and what closes their batch."""

    __slots__ = ("full", "num_prompt_tokens", "requests")

    def __init__(self) -> None:
        self.requests: list[RequestState] = []
        self.num_prompt_tokens = 0
        self.full: str | None = None


class Dynamic:
    """Starts when a batch is full or when the window since its first request ends; groups by length.

    A group holds the requests whose expected lengths lie between the same powers of two, so that the slowest
    row of a batch takes about twice as long as any other, at most. Each group has its own window; of those
    due, the one with the oldest request goes first, so nobody starves. Given `max_batch_tokens`, a batch is full
    too when the next prompt would bring the sum of its prompts above that.
    """

    joins = False
    keeps_together = False
    pads = False

    def __init__(self, max_num_seqs: int, window_seconds: float, max_batch_tokens: int | None = None) -> None:
        self._max_num_seqs = max_num_seqs
        self._max_batch_tokens = math.inf if max_batch_tokens is None else max_batch_tokens
        self._window_seconds = window_seconds

    def candidates(self, waiting: Collection[RequestState], now: float, draining: bool) -> Candidates:
        for group in self._groups(waiting):
            reason = group.full or ("drain" if draining else None)
            if reason is None and now >= group.requests[0].arrival_time + self._window_seconds:
                reason = "window"
            if reason is not None:
                return Candidates(group.requests, reason)
        return NOBODY

    def due_at(self, waiting: Collection[RequestState]) -> float:
        groups = self._groups(waiting)
        if any(group.full for group in groups):
            return 0.0
        return min(group.requests[0].arrival_time for group in groups) + self._window_seconds

    def _groups(self, waiting: Iterable[RequestState]) -> Collection[_Group]:
        """The next batch of each length, the one with the oldest request first."""
        groups: dict[int, _Group] = {}
        for request in waiting:
            group = groups.setdefault(request.expected_total_tokens.bit_length(), _Group())
            if group.full:
                continue
            tokens = group.num_prompt_tokens + request.num_prompt_tokens
            if group.requests and tokens > self._max_batch_tokens:
                group.full = "tokens"
                continue
            group.requests.append(request)
            group.num_prompt_tokens = tokens
            if len(group.requests) == self._max_num_seqs:
                group.full = "full"
        return groups.values()


def build_policy(config: EngineConfig) -> Policy:
    """The policy of `config.batching_mode`."""
    window = config.batching_window_seconds
    match config.batching_mode:
        case "none":
            return NoBatching()
        case "static":
            seconds = STATIC_WINDOW_SECONDS if window is None else window
            return Static(config.max_num_seqs, seconds, pads=config.padding != "none")
        case "dynamic":
            seconds = DYNAMIC_WINDOW_SECONDS if window is None else window
            return Dynamic(config.max_num_seqs, seconds, config.max_num_batched_tokens)
        case "continuous":
            return Continuous()
