"""The metrics of requests with LoRA adapters. Created by `metrics`, and updated by `tasks.generate`."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_COUNTERS = (
    ("conveyor_engine_adapter_requests", "Requests with an adapter that have ended."),
    ("conveyor_engine_adapter_prompt_tokens", "Prompt tokens of requests with an adapter that have ended."),
    ("conveyor_engine_adapter_generation_tokens", "Tokens generated for requests with an adapter that have ended."),
)


class AdapterUse:
    """One open request with an adapter. It waits until it has its first token."""

    def __init__(self, of: "AdapterMetrics", adapter: str) -> None:
        self._of, self._adapter = of, adapter
        self._open = of.waiting
        self._open[adapter] += 1

    def set_running(self) -> None:
        """Record that the request has a token. Later calls have no effect."""
        if self._open is self._of.running:
            return
        self._open[self._adapter] -= 1
        self._open = self._of.running
        self._open[self._adapter] += 1

    def end(self, prompt_tokens: int, generation_tokens: int) -> None:
        """Record that the request has ended. Call exactly once."""
        self._open[self._adapter] -= 1
        for totals, number in zip(self._of.totals, (1, prompt_tokens, generation_tokens), strict=True):
            if self._adapter in self._of.adapters:
                totals[self._adapter] += number


class AdapterMetrics(Collector):
    """What requests with each adapter use. For a model without adapters, the metrics have no values."""

    def __init__(self, label: Mapping[str, str], adapters: Mapping[str, object]) -> None:
        """label: of the model. adapters: those that are served now, by name. It may change."""
        self._label_names, self._label_values = list(label), list(label.values())
        self.adapters = adapters
        self.waiting, self.running = Counter[str](), Counter[str]()  # open requests, by the adapter's name
        self.totals = [Counter[str]() for _ in _COUNTERS]

    def describe(self) -> list[Metric]:
        return []  # otherwise registering would collect the metrics

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. prometheus_client calls this at each scrape."""
        names = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of requests that have tokens, and of those that have none yet. The value is the time.",
            labels=[*self._label_names, *names],
        )
        if self.adapters:
            values = (str(len(self.adapters)), self._list(self.running), self._list(self.waiting))
            info.add_metric([*self._label_values, *values], time.time())
        yield info
        for (name, text), totals in zip(_COUNTERS, self.totals, strict=True):
            counter = CounterMetricFamily(name, text, labels=[*self._label_names, "adapter"])
            for removed in totals.keys() - self.adapters.keys():
                del totals[removed]
            for adapter in self.adapters:
                counter.add_metric([*self._label_values, adapter], totals[adapter])
            yield counter

    def _list(self, numbers: Counter[str]) -> str:
        return ",".join(adapter for adapter in self.adapters if numbers[adapter])
