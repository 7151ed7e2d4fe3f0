"""Every metric of the engine, each name once. Filled by `http` and by the engine's steps; rendered at /metrics.

Metrics that vLLM has too keep its names (vllm:*), for dashboards, gateways and load generators; the others are
conveyor_engine_*. Gauges and counters of the engine process are read from its newest snapshot.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from conveyor_engine.wire.messages import Step
from conveyor_engine.wire.request import EngineStats, FinishReason, ModelFacts

_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN_TOKENS_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_POWERS_OF_TWO = tuple(2**power for power in range(15))

# (name, help, how to read it from a snapshot)
_GAUGES: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:num_requests_running", "Requests that take part in steps.", lambda s: s.num_running),
    ("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.", lambda s: s.kv_cache_usage),
)
_COUNTERS: tuple[tuple[str, str, Callable[[EngineStats], float]], ...] = (
    ("vllm:prompt_tokens", "Prompt tokens computed or found in the prefix cache.", lambda s: s.prompt_tokens),
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
    ("conveyor_engine_steps", "Steps run.", lambda s: s.num_steps),
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


class EngineMetrics:
    """The engine's metrics in a registry of their own."""

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._label = {"model_name": model_name}
        self._registry.register(_Snapshot(self))
        self.stats = EngineStats()
        self.num_waiting: Callable[[], int] = lambda: self.stats.num_waiting
        self.facts: Callable[[], ModelFacts | None] = lambda: None
        self.start_seconds: Callable[[], Mapping[str, float]] = dict
        self._first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_SECONDS
        )
        self._between_tokens = _Counts(_BETWEEN_TOKENS_SECONDS)
        self._per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per token after the first of one answer.",
            _BETWEEN_TOKENS_SECONDS,
        )
        self._request = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_SECONDS
        )
        self._prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Of one request.", _POWERS_OF_TWO)
        self._output_tokens = self._histogram("vllm:request_generation_tokens", "Of one answer.", _POWERS_OF_TWO)
        self._max_tokens = self._histogram("vllm:request_params_max_tokens", "As asked for.", _POWERS_OF_TWO)
        self._step_tokens = self._histogram("vllm:iteration_tokens_total", "Tokens of one step.", _POWERS_OF_TWO)
        self._step_seqs = self._histogram(
            "conveyor_engine_batch_size", "Requests that took part in one step.", _POWERS_OF_TWO[:11]
        )
        self._success = self._counter("vllm:request_success", "Answers, by how they ended.", "finished_reason")
        for reason in set(FinishReason) - {FinishReason.STOP_STRING}:  # reported as STOP
            self._success.labels(finished_reason=reason.value)  # present at 0 from the start
        self._rejections = self._counter("vllm:admission_rejections", "Requests refused, by why.", "reason")
        self._ignored_fields = self._counter(
            "conveyor_engine_ignored_fields", "Fields of requests that nobody defines: ignored.", "kind"
        )
        self._responses = self._counter("conveyor_engine_http_responses", "By route and status.", "route", "status")

    def render(self) -> bytes:
        """Prometheus text format."""
        return generate_latest(self._registry)

    def observe_step(self, step: Step) -> None:
        """After each engine step, also one that only reported aborts."""
        ran = step.stats.num_steps > self.stats.num_steps
        self.stats = step.stats
        if ran:
            self._step_tokens.observe(step.stats.step_num_tokens)
            self._step_seqs.observe(step.stats.step_num_seqs)

    def observe_prompt(self, num_tokens: int, max_tokens: int | None = None) -> None:
        """When a request was admitted; an embedding has no `max_tokens`."""
        self._prompt_tokens.observe(num_tokens)
        if max_tokens is not None:
            self._max_tokens.observe(max_tokens)

    def observe_first_token(self, seconds: float) -> None:
        """Since the request's arrival."""
        self._first_token.observe(seconds)

    def observe_next_tokens(self, seconds: float, num_tokens: int) -> None:
        """`num_tokens` came `seconds` after the ones before them."""
        self._between_tokens.add(seconds / num_tokens, num_tokens)

    def observe_end(self, reason: str, num_tokens: int, seconds: float, seconds_after_first: float) -> None:
        """When one answer ended."""
        self._success.labels(finished_reason=reason).inc()
        self._output_tokens.observe(num_tokens)
        self._request.observe(seconds)
        if num_tokens > 1:
            self._per_output_token.observe(seconds_after_first / (num_tokens - 1))

    def count_rejection(self, reason: str) -> None:
        """One request was refused before it ran."""
        self._rejections.labels(reason=reason).inc()

    def count_ignored_fields(self, kind: str, number: int) -> None:
        """A request of this kind had so many fields that nobody defines. Their names would be labels without end."""
        self._ignored_fields.labels(kind=kind).inc(number)

    def count_response(self, route: str, status: int) -> None:
        """One HTTP answer began."""
        self._responses.labels(route=route, status=str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """The metrics that are read from the newest snapshot, or made of counts, at a scrape."""
        stats, names, values = self.stats, list(self._label), list(self._label.values())
        for name, text, read in (
            *_GAUGES,
            ("vllm:num_requests_waiting", "Requests without a place in the batch.", lambda _: self.num_waiting()),
        ):
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, read(stats))
            yield gauge
        for name, text, read in _COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, read(stats))
            yield counter
        between = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Between two tokens of one answer.", labels=names
        )
        between.add_metric(values, self._between_tokens.buckets(), self._between_tokens.sum)
        yield between
        closes = CounterMetricFamily(
            "conveyor_engine_batch_close", "Batches closed, by why.", labels=[*names, "reason"]
        )
        for reason, count in stats.batch_close_reasons.items():
            closes.add_metric([*values, reason], count)
        yield closes
        if (facts := self.facts()) is not None:
            info = GaugeMetricFamily(
                "vllm:cache_config_info", "The KV cache's shape.", labels=[*names, "block_size", "num_gpu_blocks"]
            )
            info.add_metric([*values, str(facts.block_size), str(facts.num_kv_blocks)], 1)
            yield info
        start = GaugeMetricFamily(
            "conveyor_engine_start_seconds",
            "What it took the engine process to be ready: to load the weights, to warm up.",
            labels=[*names, "part"],
        )
        for part, seconds in self.start_seconds().items():
            start.add_metric([*values, part], seconds)
        yield start
        capacity = GaugeMetricFamily(
            "conveyor_engine_capacity",
            "Requests that it could run at once lately: its batch, or what the KV cache carried.",
            labels=names,
        )
        if facts is not None:
            capacity.add_metric(values, facts.max_num_seqs if stats.num_carried is None else stats.num_carried)
        yield capacity

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(name, text, list(self._label), buckets=buckets, registry=self._registry)
        return histogram.labels(**self._label)

    def _counter(self, name: str, text: str, *labels: str) -> "_LabelledCounter":
        return _LabelledCounter(Counter(name, text, [*self._label, *labels], registry=self._registry), self._label)


class _Counts:
    """A histogram that takes many equal values at once; prometheus_client's would cost each token a microsecond."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = (*bounds, math.inf)
        self._counts = [0] * len(self._bounds)
        self.sum = 0.0

    def add(self, value: float, times: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, int]]:
        """Each bound, and how many values were not above it."""
        return list(zip(map(floatToGoString, self._bounds), itertools.accumulate(self._counts), strict=True))


class _LabelledCounter:
    """A counter whose model name is already filled in."""

    def __init__(self, counter: Counter, label: dict[str, str]) -> None:
        self._counter = counter
        self._label = label

    def labels(self, **labels: str) -> Counter:
        return self._counter.labels(**self._label, **labels)


class _Snapshot(Collector):
    """Makes the registry ask EngineMetrics at each scrape."""

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect()

    def describe(self) -> list[GaugeMetricFamily]:
        return []  # so that registering does not collect
