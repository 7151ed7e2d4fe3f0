"""What the scheduler counts for `EngineStats`: steps, tokens, prefix hits, KV room. Used by `scheduler` alone."""

from collections import Counter
from collections.abc import Iterable

import msgspec

from conveyor_engine.scheduling.request_state import RequestState
from conveyor_engine.scheduling.step import Step
from conveyor_engine.wire.request import EngineStats


class Counters:
    """Counters since the start; the gauges are the caller's."""

    def __init__(self) -> None:
        self._stats = EngineStats()
        self._close_reasons: Counter[str] = Counter()

    def stats(
        self, *, num_running: int, num_waiting: int, kv_cache_usage: float, num_carried: int | None
    ) -> EngineStats:
        """A snapshot, with these gauges."""
        return msgspec.structs.replace(
            self._stats,
            num_running=num_running,
            num_waiting=num_waiting,
            kv_cache_usage=kv_cache_usage,
            num_carried=num_carried,
            batch_close_reasons=dict(self._close_reasons),
        )

    def count_close(self, reason: str) -> None:
        self._close_reasons[reason] += 1

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

    def count_step(self, step: Step) -> None:
        stats = self._stats
        stats.num_steps += 1
        stats.step_num_seqs = len(step.decodes) + len(step.prefills)
        stats.step_num_tokens = step.num_tokens
        stats.padding_tokens += step.num_padding_tokens

    def count_kv(self, running: Iterable[RequestState], block_size: int) -> None:
        """Once after each step: tokens that the cache holds, and the room that they have."""
        num_live = num_blocks = 0
        for request in running:
            num_blocks += len(request.block_table)
            if request.finished is None:
                num_live += request.num_live_tokens
        self._stats.kv_live_token_steps += num_live
        self._stats.kv_allocated_token_steps += num_blocks * block_size
