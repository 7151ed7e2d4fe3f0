"""Sums up the traffic that engines report at `/metrics`. Pure; used by `advising` and `conveyor_console`.

A metric that vLLM also exports has vLLM's name, so that engines with `runtime: VLLM` can be read.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_MAX_VALUE: Final = 1e15  # larger ones are invalid, so that sums and products stay finite
_MAX_BOUNDS: Final = 64  # of one histogram
_HISTOGRAMS: Final = {
    "vllm:request_prompt_tokens": "prompt_tokens",
    "vllm:request_generation_tokens": "output_tokens",
    "vllm:time_to_first_token_seconds": "ttft",
    "vllm:inter_token_latency_seconds": "itl",
    "vllm:e2e_request_latency_seconds": "latency",
    "vllm:request_queue_time_seconds": "queue",
    "conveyor_engine_batch_size": "batch_size",
}


@dataclass(slots=True)
class Histogram:
    """A histogram. `counts`: the number of values up to each bound. `total`: the sum of the values."""

    counts: Counter[float] = field(default_factory=Counter)
    total: float = 0.0

    @property
    def number(self) -> int:
        """The number of values."""
        return int(self.counts.get(math.inf, 0))

    @property
    def mean(self) -> float:
        return self.total / self.number if self.number else 0.0

    def add(self, other: "Histogram") -> None:
        """Add the values of another histogram with the same bounds."""
        self.counts.update(other.counts)
        self.total += other.total

    def since(self, earlier: "Histogram") -> "Histogram":
        """Return the values that were added after `earlier`."""
        counts = Counter({bound: count - earlier.counts.get(bound, 0) for bound, count in self.counts.items()})
        return Histogram(counts, self.total - earlier.total)

    def percentile(self, percent: float) -> float:
        """Return a percentile; 0 without values.

        Interpolates linearly within a bucket, as Prometheus' `histogram_quantile` does.
        """
        rank, low, below = self.number * percent / 100, 0.0, 0.0
        for bound, count in sorted(self.counts.items()):
            if count >= rank and count > below:
                return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
            low, below = bound, count
        return 0.0


@dataclass(slots=True)
class Traffic:
    """The traffic since the engines started.

    `kv_tokens`: size of one engine's KV cache in tokens; None if no engine reports it. `kv_usage`: share of the KV
    cache in use now, 0 to 1, of the engine that uses most. `tokens`: generated tokens. `drafts`, `accepted_drafts`:
    tokens that were guessed and computed, and those of them that were right.
    """

    engines: int = 0
    histograms: dict[str, Histogram] = field(default_factory=lambda: {n: Histogram() for n in _HISTOGRAMS.values()})
    preemptions: int = 0
    closes: Counter[str] = field(default_factory=Counter)
    kv_tokens: int | None = None
    kv_usage: float | None = None
    tokens: float = 0.0
    drafts: float = 0.0
    accepted_drafts: float = 0.0

    def __getitem__(self, name: str) -> Histogram:
        return self.histograms[name]

    @property
    def requests(self) -> int:
        """The number of admitted requests."""
        return self["prompt_tokens"].number


def read_traffic(pages: Sequence[str]) -> Traffic:
    """Read the traffic from one Prometheus page for each engine. Raises ValueError for an invalid page."""
    traffic = Traffic(len(pages))
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                _add(traffic, sample.name, sample.labels, sample.value)
    return traffic


def _add(traffic: Traffic, name: str, labels: dict[str, str], value: float) -> None:
    if not 0 <= value <= _MAX_VALUE:
        return
    base, _, part = name.rpartition("_")
    if base in _HISTOGRAMS:
        histogram = traffic[_HISTOGRAMS[base]]
        if part == "bucket":
            _count(histogram, float(labels["le"]), value)
        elif part == "sum":
            histogram.total += value
    elif name == "vllm:num_preemptions_total":
        traffic.preemptions += round(value)
    elif name == "vllm:generation_tokens_total":
        traffic.tokens += value
    elif name == "vllm:spec_decode_num_draft_tokens_total":
        traffic.drafts += value
    elif name == "vllm:spec_decode_num_accepted_tokens_total":
        traffic.accepted_drafts += value
    elif name == "vllm:kv_cache_usage_perc":
        traffic.kv_usage = max(value, traffic.kv_usage or 0.0)
    elif name == "conveyor_engine_batch_close_total":
        traffic.closes[labels["reason"]] += round(value)
    elif name == "vllm:cache_config_info":
        traffic.kv_tokens = _find_kv_tokens(labels)


def _count(histogram: Histogram, bound: float, value: float) -> None:
    if bound in histogram.counts or len(histogram.counts) < _MAX_BOUNDS:
        histogram.counts[bound] += round(value)


def _find_kv_tokens(labels: dict[str, str]) -> int | None:
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"]) or None
    except (LookupError, ValueError):
        return None
