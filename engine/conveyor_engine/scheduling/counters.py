"""Counters and estimates of the scheduler for `EngineStats`. Used by `scheduler` and `outputs`. Time is an argument."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.kv_tables import KVTables
from conveyor_engine.wire.request import EngineStats

_LATELY_SECONDS: Final = 60.0  # time constant of the decay: a value of this age counts 0.37
_LONGEST_PAUSE_SECONDS: Final = 1.0  # the limit on counted time between two steps
_LENGTHS_MIN: Final = 100  # how many requests must have ended before their mean length is used


class Counters:
    """Counters since the start. The caller adds the gauges."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._close_reasons: Counter[str] = Counter()

    def stats(
        self,
        *,
        num_running: int,
        num_waiting: int,
        kv_cache_usage: float,
        num_carried: int | None,
        busy_seconds: float,
        unclaimed_seconds: float,
    ) -> EngineStats:
        """Return a snapshot with these gauges and times."""
        return msgspec.structs.replace(
            self._stats,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=kv_cache_usage,
            num_carried=num_carried,
            busy_seconds=busy_seconds,
            unclaimed_seconds=unclaimed_seconds,
            batch_close_reasons=dict(self._close_reasons),
        )

    def count_batch(self, reason: str, cost: int, padding_share: float, wait_seconds: float) -> None:
        """Count a batch that closes. At most one closes in a step, so the statistics contain only the newest."""
        self._close_reasons[reason] += 1
        stats = self._stats
        stats.num_batches += 1
        stats.batch_cost, stats.batch_padding_share, stats.batch_wait_seconds = cost, padding_share, wait_seconds

    def count_late(self) -> None:
        self._stats.num_late += 1

    def count_preemption(self) -> None:
        self._stats.num_preemptions += 1

    def count_prefix(self, query_tokens: int, hit_tokens: int) -> None:
        self._stats.prefix_cache_query_tokens += query_tokens
        self._stats.prefix_cache_hit_tokens += hit_tokens

    def count_prompt(self, request: RequestState) -> None:
        self._stats.prompt_tokens += request.num_prompt_tokens
        self._stats.prompt_tokens_cached += request.num_cached_tokens

    def count_generated(self, num_tokens: int) -> None:
        self._stats.generation_tokens += num_tokens

    def count_drafts(self, num_drafts: int) -> None:
        """Count the drafts of one request in one step."""
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += num_drafts

    def count_accepted(self) -> None:
        """Count a draft that is now a token of its answer."""
        self._stats.num_accepted_tokens += 1

    def count_step(self, step: Step) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.step_num_seqs = len(step.work)
        stats.step_num_tokens = step.num_tokens
        stats.padding_tokens += step.num_padding_tokens

    def count_kv(self, running: Iterable[RequestState], num_allocated: int, tables: KVTables) -> None:
        """Count the tokens in the KV cache, and the capacity of their blocks. Called once after each step.

        A token counts fully if each table has it. num_allocated: the capacity in all tables together.
        """
        lengths = [request.num_live_tokens for request in running if request.finished is None and request.row >= 0]
        num_live = tables.full * sum(lengths)
        if tables.windowed:
            num_live += tables.windowed * sum(min(length, tables.window) for length in lengths)
        self._stats.kv_live_token_steps += num_live // tables.number
        self._stats.kv_allocated_token_steps += num_allocated // tables.number


class Carried:
    """How many requests the KV cache recently held at once: a decaying mean over the time with running requests.

    Until the cache runs out of blocks for the first time, this number is an estimate: how many requests of the declared
    lengths, or else of the lengths observed so far, the cache would hold. The autoscaler compares the requests in
    flight with this number.
    """

    def __init__(self, max_num_seqs: int, expected: int | None = None, num_blocks: int = 0) -> None:
        """expected: the number for declared lengths; None: the cache holds the whole batch, or no lengths are declared.
        num_blocks: the blocks of the cache, if lengths are observed; 0: they are not."""
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._num_lengths = 0
        self._mean_blocks = 0.0  # mean number of blocks of a request when it ends
        self._at = 0.0
        self._running = 0.0
        self._used = 0.0
        self._number: float | None = expected

    @property
    def number(self) -> int | None:
        """The number of requests; None if the cache has room for the whole batch, as far as is known."""
        number = self._number
        if number is None and self._num_lengths >= _LENGTHS_MIN:
            likely = self._num_blocks / self._mean_blocks
            number = likely if round(likely) < self._max_num_seqs else None
        return None if number is None else max(1, round(number))

    def learn(self, num_blocks: int) -> None:
        """Record a request that ends. Has no effect once blocks have run out.

        num_blocks: the number of its blocks, without blocks that were found in the prefix cache.
        """
        if self._num_blocks:
            self._num_lengths += 1
            error = max(1, num_blocks) - self._mean_blocks
            self._mean_blocks += error / min(self._num_lengths, _LENGTHS_MIN)

    def observe(self, now: float, num_running: int, usage: float, short: bool) -> None:
        """Record a planned step: how many requests run, their share of the blocks, and whether blocks ran out.

        If blocks ran out, the cache holds the number of running requests. Otherwise it may hold more: the number of
        requests of the same size that would fit.
        """
        if short:
            self._num_blocks = self._num_lengths = 0  # from now on the number is measured
        weight = min(now - self._at, _LONGEST_PAUSE_SECONDS) / _LATELY_SECONDS
        self._at = now
        self._running += weight * (num_running - self._running)
        self._used += weight * (usage - self._used)
        fit = self._running / self._used if self._used > 0 else 0.0
        if self._number is not None:
            seen = num_running if short else max(self._number, fit)
            self._number += weight * (seen - self._number)
        elif short:
            self._number = max(num_running, fit)
        if self._number is not None and round(self._number) >= self._max_num_seqs:
            self._number = None
