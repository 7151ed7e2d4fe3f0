"""The metrics that are computed at a scrape, from the engine process's newest state. Used by `metrics`."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from conveyor_engine.wire.request import EngineStats, ModelFacts

# (name, help, how to read it from a snapshot)
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests that take part in steps.", lambda s: s.num_running),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", lambda s: s.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens computed or found in the prefix cache.", lambda s: s.prompt_tokens),
    (
        "vllm:prompt_tokens_cached",
        "Prompt tokens found in the prefix cache, each prompt's first time.",
        lambda s: s.prompt_tokens_cached,
    ),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("vllm:num_preemptions", "Requests preempted, to be computed again.", lambda s: s.num_preemptions),
    (
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache: of prompts and, after a preemption, of answers so far.",
        lambda s: s.prefix_cache_query_tokens,
    ),
    (
        "vllm:prefix_cache_hits",
        "Tokens found in the prefix cache, of those looked up.",
        lambda s: s.prefix_cache_hit_tokens,
    ),
    (
        "vllm:spec_decode_num_drafts",
        "Drafts of next tokens, of one request in one step each.",
        lambda s: s.num_drafts,
    ),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of these drafts.", lambda s: s.num_draft_tokens),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Draft tokens that the model accepted, each of which saved a step.",
        lambda s: s.num_accepted_tokens,
    ),
    ("conveyor_engine_steps", "Steps run.", lambda s: s.num_steps),
    (
        "conveyor_engine_busy_seconds",
        "Time of steps, divided among their requests: the sum of all receipts.",
        lambda s: s.busy_seconds,
    ),
    (
        "conveyor_engine_unclaimed_seconds",
        "Time of steps whose requests had all ended before the step did.",
        lambda s: s.unclaimed_seconds,
    ),
    (
        "conveyor_engine_late_requests",
        "Requests dropped before their first step, because they could not meet their deadlines any more.",
        lambda s: s.num_late,
    ),
    ("conveyor_engine_padding_tokens", "Dummy tokens stepped.", lambda s: s.padding_tokens),
    (
        "conveyor_engine_kv_live_token_steps",
        "Sum over steps of tokens in the KV cache.",
        lambda s: s.kv_live_token_steps,
    ),
    (
        "conveyor_engine_kv_allocated_token_steps",
        "Sum over steps of the room allocated for them; waste is 1 - live / allocated.",
        lambda s: s.kv_allocated_token_steps,
    ),
)


class Counts:
    """A histogram to which many equal values can be added at once.

    prometheus_client's histogram takes 1 µs for each value, and each token is a value.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    def add(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Return each bound, and the number of values that are at most this bound."""
        return list(zip(map(floatToGoString, self._bounds), itertools.accumulate(self._counts), strict=True))


class Snapshot(Collector):
    """Exports the engine's state as metrics. `server` sets the functions that read the state."""

    def __init__(self, label: Mapping[str, str], between_tokens: Counts) -> None:
        self._names, self._values = list(label), list(label.values())
        self._between_tokens = between_tokens
        self.stats = EngineStats()
        self.num_waiting: Callable[[], int] = lambda: self.stats.num_waiting
        self.facts: Callable[[], ModelFacts | None] = lambda: None
        self.start_seconds: Callable[[], Mapping[str, float]] = dict
        self.num_lost_spans: Callable[[], int] = lambda: 0  # with traces, those of the tracer

    def describe(self) -> list[Metric]:
        return []  # otherwise registering would collect the metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus_client calls this at each scrape."""
        for name, text, read in _GAUGES:
            yield self._gauge(name, text, read(self.stats))
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=self._names)
            counter.add_metric(self._values, read(self.stats))
            yield counter
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of one answer.", labels=self._names
        )
        buckets, seconds = self._between_tokens.buckets(), self._between_tokens.sum
        between.add_metric(self._values, buckets, seconds)
        yield between
        former = SummaryMetricFamily(  # vLLM's former name of the same, which OpenCost reads
            "vllm:time_per_output_token_seconds", "Between two tokens of one answer.", labels=self._names
        )
        former.add_metric(self._values, buckets[-1][1], seconds)
        yield former
        closes = CounterMetricFamily(
            "conveyor_engine_batch_close", "Batches closed, by reason.", labels=[*self._names, "reason"]
        )
        for reason, count in self.stats.batch_close_reasons.items():
            closes.add_metric([*self._values, reason], count)
        yield closes
        lost = CounterMetricFamily(
            "conveyor_engine_lost_spans", "Sampled spans that no collector got.", labels=self._names
        )
        lost.add_metric(self._values, self.num_lost_spans())
        yield lost
        yield from self._waiting()
        if (facts := self.facts()) is not None:
            yield self._cache_config(facts)
        yield from self._capacity(facts)

    def _waiting(self) -> Iterator[Metric]:
        waiting = self.num_waiting()
        yield self._gauge("vllm:num_requests_waiting", "Requests without a place in the batch.", waiting)
        reasons = {"capacity": waiting, "deferred": 0}  # vLLM's names; this engine defers no request
        yield self._gauges("vllm:num_requests_waiting_by_reason", "Waiting requests, by reason.", "reason", reasons)

    def _cache_config(self, facts: ModelFacts) -> Metric:
        size = facts.kv_tables.count_tokens(facts.num_kv_blocks, facts.block_size, facts.max_model_len)
        labels = {
            "block_size": str(facts.block_size),
            "num_gpu_blocks": str(facts.num_kv_blocks),
            "kv_cache_size_tokens": str(size),
            "kv_cache_max_concurrency": str(size / facts.max_model_len),
        }
        info = GaugeMetricFamily("vllm:cache_config_info", "The KV cache's shape.", labels=[*self._names, *labels])
        info.add_metric([*self._values, *labels.values()], 1)
        return info

    def _capacity(self, facts: ModelFacts | None) -> Iterator[Metric]:
        yield self._gauges(
            "conveyor_engine_start_seconds",
            "Seconds that each part of the engine process's start took: loading the weights, warming up.",
            "part",
            self.start_seconds(),
        )
        capacity = GaugeMetricFamily(
            "conveyor_engine_capacity",
            "Requests that can run at once: the batch size, or what KV cache or objectives recently allowed.",
            labels=self._names,
        )
        if facts is not None:
            allowed = self.stats.capacity
            capacity.add_metric(self._values, facts.max_num_seqs if allowed is None else allowed)
        yield capacity
        lost = GaugeMetricFamily(
            "conveyor_engine_lost_graphs",
            "CUDA graphs that could not be captured at the start, so that the steps of their sizes are slower.",
            labels=self._names,
        )
        if facts is not None:
            lost.add_metric(self._values, facts.num_lost_graphs)
        yield lost
        yield from self._limits(facts)

    def _limits(self, facts: ModelFacts | None) -> Iterator[Metric]:
        """Yield the metrics of limits, without values if there are no objectives."""
        stats, values = self.stats, dict[str, float]()
        if facts is not None and stats.limit_reason is not None:
            values["rows"] = facts.max_num_seqs if stats.max_running is None else stats.max_running
            tokens = stats.max_prompt_tokens
            values["prompt_tokens"] = facts.max_num_batched_tokens if tokens is None else tokens
        yield self._gauges(
            "conveyor_engine_limit", "Limits of a step that the objectives set: rows and prompt tokens.", "of", values
        )
        moves = CounterMetricFamily(
            "conveyor_engine_limit_moves", "Changes of these limits, by reason.", labels=[*self._names, "reason"]
        )
        for reason, count in stats.limit_moves.items():
            moves.add_metric([*self._values, reason], count)
        yield moves

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=self._names)
        gauge.add_metric(self._values, value)
        return gauge

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=[*self._names, label])
        for each, value in values.items():
            gauge.add_metric([*self._values, each], value)
        return gauge
