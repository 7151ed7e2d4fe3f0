"""All Prometheus metrics of the gateway.

`record` and `listening` count them. `gauges` reads the state of queues at scrape time. The page is written in pieces,
so that other requests are served in between. Labels name only known services, and the series of a deleted service are
dropped. So clients cannot increase the number of series. Only the names of keys, and those that trusted proxies give to
clients, can (`named_clients`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from conveyor_gateway.recording.gauges import ServiceGauges
from conveyor_gateway.recording.named_clients import NamedClient, NamedClients
from conveyor_gateway.recording.series import Counter, Counters, Family, Histogram, Histograms, Series
from conveyor_protocol.usage import UsedTokens

_SERVICE = ("namespace", "inference_service")
OTHER_CLIENTS: Final = "other"  # those without series of their own, and their owners
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


@dataclass(frozen=True, slots=True)
class _ClientSeries:
    """The series of one client's requests of one class for one service."""

    requests: Counter
    prompt_tokens: Counter
    cached_tokens: Counter
    generation_tokens: Counter
    busy_seconds: Counter


class Metrics:
    """One registry per process. `service` is always the `namespace/name` of a known service, or empty."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()  # of series without a service
        self.gauges: ServiceGauges | None = None
        self._series: dict[str, _ServiceSeries] = {}
        self._requests_by_code: dict[str, dict[int, Counter]] = {}
        self._families: list[Family[Counter] | Family[Histogram]] = []
        # The label values of each service's series, so that its end costs nothing for other services.
        self._labels: dict[str, set[tuple[Family[Counter] | Family[Histogram], tuple[str, ...]]]] = {}
        self._named = NamedClients(lambda named: self._client_series[named].requests.value, self._drop_named)
        self._client_series: dict[tuple[str, str, str, str], _ClientSeries] = {}  # by the fields of NamedClient
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
        of_client = "client", "request_class", "owner"
        self._client_requests = self._counter(
            "client_requests", "Requests that engines processed, by the client's key or name.", *of_client
        )
        self._client_prompt_tokens = self._counter(
            "client_prompt_tokens", "Tokens of prompts, by the client's key or name.", *of_client
        )
        self._client_cached_tokens = self._counter(
            "client_cached_prompt_tokens", "Cached tokens of prompts, by the client's key or name.", *of_client
        )
        self._client_generation_tokens = self._counter(
            "client_generation_tokens", "Tokens generated, by the client's key or name.", *of_client
        )
        self._client_busy_seconds = self._counter(
            "client_busy_seconds", "Time of engines' steps for requests, by the client's key or name.", *of_client
        )
        self._of_clients = (
            self._client_requests,
            self._client_prompt_tokens,
            self._client_cached_tokens,
            self._client_generation_tokens,
            self._client_busy_seconds,
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counters:
        family = Counters(f"conveyor_gateway_{name}_total", text, (*_SERVICE, *labels))
        self._families.append(family)
        return family

    def _histogram(self, name: str, text: str, *labels: str) -> Histograms:
        family = Histograms(f"conveyor_gateway_{name}", text, (*_SERVICE, *labels), _BUCKETS_SECONDS)
        self._families.append(family)
        return family

    def _find(self, family: Family[Series], service: str, *values: str) -> Series:
        """Return the service's series with these values of the other labels."""
        labels = (*_split(service), *values)
        series = family.find(labels)
        if series is None:
            series = family.add(labels)
            self._labels.setdefault(service, set()).add((family, labels))
        return series

    def count_request(self, service: str, code: int) -> None:
        by_code = self._requests_by_code.setdefault(service, {})
        if code not in by_code:
            by_code[code] = self._find(self._requests, service, str(code))
        by_code[code].inc()

    def count_dropped(self, service: str, reason: str) -> None:
        self._find(self._dropped, service, reason).inc()

    def count_retry(self, service: str, reason: str) -> None:
        self._find(self._retries, service, reason).inc()

    def observe_answer(self, service: str, waited_seconds: float, first_byte_seconds: float) -> None:
        series = self._find_series(service)
        series.queue_wait.observe(waited_seconds)
        series.first_byte.observe(first_byte_seconds)

    def observe_class_wait(self, service: str, request_class: str, waited_seconds: float) -> None:
        self._find(self._class_wait, service, request_class).observe(waited_seconds)

    def count_lowered(self, service: str) -> None:
        self._find(self._lowered, service).inc()

    def count_used(self, service: str, engine_seconds: float, usage: UsedTokens | None) -> None:
        """Count the engine time and tokens of a request that an engine has processed."""
        series = self._find_series(service)
        series.engine_seconds.inc(engine_seconds)
        if usage is None:
            self._find(self._uncounted, service).inc()
            return
        series.prompt_tokens.inc(usage.prompt_tokens)
        series.cached_tokens.inc(usage.cached_tokens)
        series.generation_tokens.inc(usage.completion_tokens)

    def count_used_by_client(self, named: tuple[str, str, str, str], usage: UsedTokens | None) -> None:
        """Count a request of a client with a key, or with a name that a trusted proxy has given.

        named: the fields of its NamedClient.
        """
        series = self._client_series.get(named)
        if series is None:
            series = self._find_client_series(NamedClient(*named))
        series.requests.inc()
        if usage is not None:
            series.prompt_tokens.inc(usage.prompt_tokens)
            series.cached_tokens.inc(usage.cached_tokens)
            series.generation_tokens.inc(usage.completion_tokens)
            if usage.receipt is not None:
                series.busy_seconds.inc(usage.receipt.engine_ms / 1000)

    def _find_client_series(self, named: NamedClient) -> _ClientSeries:
        """Return the new series of a client, or those of the others if there is no room."""
        if self._named.admit(named):
            found = self._client_series[named] = self._build_client_series(named)
            return found
        return self._build_client_series(NamedClient(named.service, OTHER_CLIENTS, "", OTHER_CLIENTS))

    def _build_client_series(self, named: NamedClient) -> _ClientSeries:
        return _ClientSeries(
            self._find(self._client_requests, *named),
            self._find(self._client_prompt_tokens, *named),
            self._find(self._client_cached_tokens, *named),
            self._find(self._client_generation_tokens, *named),
            self._find(self._client_busy_seconds, *named),
        )

    def _find_series(self, service: str) -> _ServiceSeries:
        found = self._series.get(service)
        if found is None:
            found = self._series[service] = _ServiceSeries(
                self._find(self._queue_wait, service),
                self._find(self._first_byte, service),
                self._find(self._engine_seconds, service),
                self._find(self._prompt_tokens, service),
                self._find(self._cached_tokens, service),
                self._find(self._generation_tokens, service),
            )
        return found

    def drop_service(self, service: str) -> None:
        """Drop all series of a deleted service."""
        self._series.pop(service, None)
        self._requests_by_code.pop(service, None)
        self._named.remove_service(service)
        for family, labels in self._labels.pop(service, ()):
            family.remove(labels)

    def drop_client(self, client: str) -> None:
        """Drop the series of a client whose APIKey was deleted."""
        self._named.remove_client(client)

    def _drop_named(self, named: NamedClient) -> None:
        del self._client_series[named]
        labels = (*_split(named.service), named.client, named.request_class, named.owner)
        for family in self._of_clients:
            family.remove(labels)
            self._labels[named.service].discard((family, labels))

    def drop_class(self, service: str, request_class: str) -> None:
        """Drop the series of a class that was removed from the service."""
        self._class_wait.remove((*_split(service), request_class))

    def write_page(self) -> Iterator[bytes]:
        """Yield all metrics in Prometheus' text format. Services may be added and removed between two pieces."""
        yield generate_latest(self.registry)
        for family in self._families:
            yield from family.write()
        if self.gauges is not None:
            yield from self.gauges.write()


def _split(service: str) -> tuple[str, str]:
    namespace, _, name = service.partition("/")
    return namespace, name
