"""All Prometheus metrics of the gateway.

`record` and `listening` count them. The gauges are read from the queues at scrape time. Labels name only known
services, and the series of a deleted service are dropped. So clients cannot increase the number of series. Only trusted
proxies can, by the names that they give to clients, up to MAX_NAMED.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.reservations import Capacity
from conveyor_gateway.usage import Usage
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.readiness import Readiness

_SERVICE = ("namespace", "inference_service")
# The limit of pairs of a client and a service with series of their own. Further clients are counted as OTHER_CLIENTS.
MAX_NAMED: Final = 1_000
OTHER_CLIENTS: Final = "other"
_BUCKETS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class _ServiceSeries:
    """The series of one service that every answered request changes."""

    queue_wait: Histogram
    first_byte: Histogram
    engine_seconds: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    generation_tokens: Counter


class Metrics:
    """One registry per process. `service` is always the `namespace/name` of a known service, or empty."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._series: dict[str, _ServiceSeries] = {}
        self._requests_by_code: dict[str, dict[int, Counter]] = {}
        self._of_services: list[Counter | Histogram] = []
        self._requests = self._counter(
            "requests", "Finished requests, by HTTP status (499: the client disconnected).", "code"
        )
        self._dropped = self._counter(
            "dropped_requests", "Requests without a complete response from an engine, by reason.", "reason"
        )
        self._retries = self._counter("retries", "Retries of requests, by what the previous engine did.", "reason")
        self._queue_wait = self._histogram(
            "queue_wait_seconds", "Time in the queue of requests that an engine answered."
        )
        self._class_wait = self._histogram(
            "class_queue_wait_seconds",
            "Time in the queue of requests that an engine answered, by class of `queue.classes`.",
            "request_class",
        )
        self._lowered = self._counter(
            "lowered_requests", "Requests that named a more urgent class than `queue.maxClass` and were lowered to it."
        )
        self._first_byte = self._histogram(
            "time_to_first_byte_seconds", "Time from a request's arrival to the first byte of the engine's response."
        )
        self._engine_seconds = self._counter(
            "engine_seconds", "Time that requests spent at engines, including the time in an engine's own queue."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts, as engines report them.")
        self._cached_tokens = self._counter(
            "cached_prompt_tokens", "Tokens of prompts that were in an engine's prefix cache."
        )
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated, as engines report them.")
        self._uncounted = self._counter(
            "uncounted_requests", "Requests whose engine reported no tokens: it has another runtime, or has ended."
        )
        self._client_prompt_tokens = self._counter(
            "client_prompt_tokens", "Tokens of prompts, by the client that a trusted proxy named.", "client"
        )
        self._client_generation_tokens = self._counter(
            "client_generation_tokens", "Tokens generated, by the client that a trusted proxy named.", "client"
        )
        self._named: set[tuple[str, str]] = set()  # pairs of a service and a client
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter = Counter(f"conveyor_gateway_{name}", text, (*_SERVICE, *labels), registry=self.registry)
        self._of_services.append(counter)
        return counter

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        name = f"conveyor_gateway_{name}"
        histogram = Histogram(name, text, (*_SERVICE, *labels), buckets=_BUCKETS_SECONDS, registry=self.registry)
        self._of_services.append(histogram)
        return histogram

    def count_request(self, service: str, code: int) -> None:
        by_code = self._requests_by_code.setdefault(service, {})
        if code not in by_code:
            by_code[code] = self._requests.labels(*_split(service), str(code))
        by_code[code].inc()

    def count_dropped(self, service: str, reason: str) -> None:
        self._dropped.labels(*_split(service), reason).inc()

    def count_retry(self, service: str, reason: str) -> None:
        self._retries.labels(*_split(service), reason).inc()

    def observe_answer(self, service: str, waited_seconds: float, first_byte_seconds: float) -> None:
        series = self._find_series(service)
        series.queue_wait.observe(waited_seconds)
        series.first_byte.observe(first_byte_seconds)

    def observe_class_wait(self, service: str, request_class: str, waited_seconds: float) -> None:
        self._class_wait.labels(*_split(service), request_class).observe(waited_seconds)

    def count_lowered(self, service: str) -> None:
        self._lowered.labels(*_split(service)).inc()

    def count_used(self, service: str, engine_seconds: float, usage: Usage | None) -> None:
        """Count the engine time and tokens of a request that an engine has processed."""
        series = self._find_series(service)
        series.engine_seconds.inc(engine_seconds)
        if usage is None:
            self._uncounted.labels(*_split(service)).inc()
            return
        series.prompt_tokens.inc(usage.prompt_tokens)
        series.cached_tokens.inc(usage.cached_tokens)
        series.generation_tokens.inc(usage.completion_tokens)

    def count_used_by_client(self, service: str, client: str, usage: Usage) -> None:
        """Count the tokens of a request of a client that a trusted proxy has named."""
        if (service, client) not in self._named:
            if len(self._named) < MAX_NAMED:
                self._named.add((service, client))
            else:
                client = OTHER_CLIENTS
        self._client_prompt_tokens.labels(*_split(service), client).inc(usage.prompt_tokens)
        self._client_generation_tokens.labels(*_split(service), client).inc(usage.completion_tokens)

    def _find_series(self, service: str) -> _ServiceSeries:
        found = self._series.get(service)
        if found is None:
            labels = _split(service)
            found = self._series[service] = _ServiceSeries(
                self._queue_wait.labels(*labels),
                self._first_byte.labels(*labels),
                self._engine_seconds.labels(*labels),
                self._prompt_tokens.labels(*labels),
                self._cached_tokens.labels(*labels),
                self._generation_tokens.labels(*labels),
            )
        return found

    def drop_service(self, service: str) -> None:
        """Drop all series of a deleted service."""
        self._series.pop(service, None)
        self._requests_by_code.pop(service, None)
        self._named = {pair for pair in self._named if pair[0] != service}
        labels = dict(zip(_SERVICE, _split(service), strict=True))
        for metric in self._of_services:
            metric.remove_by_labels(labels)

    def drop_class(self, service: str, request_class: str) -> None:
        """Drop the series of a class that was removed from the service."""
        labels = (*_split(service), request_class)
        self._class_wait.remove_by_labels(dict(zip((*_SERVICE, "request_class"), labels, strict=True)))

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class StateCollector(Collector):
    """The gateway's state at the time of the scrape. Register it with `Metrics.registry`."""

    def __init__(self, catalog: Catalog, queues: Queues, readiness: Readiness, capacity: Capacity) -> None:
        self._catalog = catalog
        self._queues = queues
        self._readiness = readiness
        self._capacity = capacity

    def collect(self) -> Iterator[GaugeMetricFamily]:
        queued = _gauge("queued_requests", "Requests waiting for an engine.", _SERVICE)
        depth = _gauge("queue_depth", "Requests waiting at this gateway for longer than the batching window.", _SERVICE)
        dispatched = _gauge("dispatched_requests", "Requests sent to an engine and not finished.", _SERVICE)
        engines = _gauge("engines", "Engines that accept new requests.", _SERVICE)
        of_class = _gauge(
            "class_queued_requests", "Requests waiting, by class of `queue.classes`.", (*_SERVICE, "request_class")
        )
        for service, queue in self._queues.items():
            for each in service.classes.ordered:
                names = (service.namespace, service.name, each.name)
                of_class.add_metric(names, queue.count_waiting_of(each.level))
            labels = (service.namespace, service.name)
            queued.add_metric(labels, queue.queued)
            depth.add_metric(labels, queue.count_waiting_beyond(service.window_seconds))
            dispatched.add_metric(labels, queue.dispatched)
            engines.add_metric(labels, queue.num_engines)
        yield from (queued, of_class, depth, dispatched, engines)
        unreadable = _gauge("unreadable_objects", "Objects of the cluster that cannot be parsed.", ("resource",))
        unreadable.add_metric(("inferenceservices",), len(self._catalog.services.unreadable))
        unreadable.add_metric(("endpointslices",), len(self._catalog.slices.unreadable))
        unreadable.add_metric(("servednames",), len(self._catalog.claims.unreadable))
        yield unreadable
        silence = _gauge("watch_silence_seconds", "Time since the API server last sent data, by watch.", ("watch",))
        for name, seconds in self._readiness.silences():
            silence.add_metric((name,), seconds)
        yield silence
        held = _gauge("held_body_bytes", "Bytes of request bodies and buffered responses in memory.", ())
        held.add_metric((), self._capacity.held_bytes)
        yield held


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"conveyor_gateway_{name}", text, labels=labels)


def _split(service: str) -> tuple[str, str]:
    namespace, _, name = service.partition("/")
    return namespace, name
