"""The gauges of the metrics page: the state of each service's queue, and of the gateway as a whole, at scrape time."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.admission.service_queue import ServiceQueue
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.recording.series import write_family, write_labels
from conveyor_gateway.watching.catalog import Catalog, Service
from conveyor_gateway.watching.readiness import Readiness

if TYPE_CHECKING:
    from conveyor_process.otlp import Tracer

_SERVICE = ("namespace", "inference_service")


class ServiceGauges:
    """The state of each service's queue. Set it as `Metrics.gauges`."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues

    def write(self) -> Iterator[bytes]:
        """Yield the gauges in Prometheus' text format, with the values at this time."""
        queues = self._queues.items()
        yield from _write("queued_requests", "Requests waiting for an engine.", queues, lambda _, queue: queue.queued)
        yield from _write(
            "queue_depth",
            "Requests waiting at this gateway for longer than the batching window.",
            queues,
            lambda service, queue: queue.count_waiting_beyond(service.window_seconds),
        )
        yield from _write(
            "dispatched_requests",
            "Requests sent to an engine and not finished.",
            queues,
            lambda _, queue: queue.dispatched,
        )
        yield from _write("engines", "Engines that accept new requests.", queues, lambda _, queue: queue.num_engines)
        yield from _write_classes(queues)


_Queues = list[tuple[Service, ServiceQueue]]


def _write(name: str, text: str, queues: _Queues, read: Callable[[Service, ServiceQueue], int]) -> Iterator[bytes]:
    name = f"conveyor_gateway_{name}"
    lines = (
        f"{name}{{{write_labels(_SERVICE, (service.namespace, service.name))}}} {read(service, queue)}\n"
        for service, queue in queues
    )
    return write_family(name, text, "gauge", lines)


def _write_classes(queues: _Queues) -> Iterator[bytes]:
    name, names = "conveyor_gateway_class_queued_requests", (*_SERVICE, "request_class")
    lines = (
        f"{name}{{{write_labels(names, (service.namespace, service.name, each.name))}}} "
        f"{queue.count_waiting_of(each.level)}\n"
        for service, queue in queues
        for each in service.classes.ordered
    )
    return write_family(name, "Requests waiting, by class of `queue.classes`.", "gauge", lines)


class StateCollector(Collector):
    """The state of the gateway as a whole, at the time of the scrape. Register it with `Metrics.registry`."""

    def __init__(self, catalog: Catalog, readiness: Readiness, ledger: Ledger, tracer: "Tracer | None" = None) -> None:
        self._catalog = catalog
        self._readiness = readiness
        self._ledger = ledger
        self._tracer = tracer

    def collect(self) -> Iterator[Metric]:
        unreadable = _gauge("unreadable_objects", "Objects of the cluster that cannot be parsed.", ("resource",))
        unreadable.add_metric(("inferenceservices",), len(self._catalog.services.unreadable))
        unreadable.add_metric(("endpointslices",), len(self._catalog.slices.unreadable))
        unreadable.add_metric(("servednames",), len(self._catalog.claims.unreadable))
        unreadable.add_metric(("apikeys",), len(self._catalog.keys.unreadable))
        yield unreadable
        silence = _gauge("watch_silence_seconds", "Time since the API server last sent data, by watch.", ("watch",))
        for name, seconds in self._readiness.silences():
            silence.add_metric((name,), seconds)
        yield silence
        held = _gauge("held_body_bytes", "Bytes of request bodies and buffered responses in memory.", ())
        held.add_metric((), self._ledger.bytes.total)
        requests = _gauge("held_requests", "Requests of clients and queries to engines.", ("namespace",))
        for namespace, count in self._ledger.requests.namespaces.items():
            requests.add_metric((namespace,), count)
        yield from (held, requests)
        num_lost = 0 if self._tracer is None else self._tracer.num_lost
        yield CounterMetricFamily("conveyor_gateway_lost_spans", "Sampled spans that no collector got.", value=num_lost)


def _gauge(name: str, text: str, labels: tuple[str, ...]) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"conveyor_gateway_{name}", text, labels=labels)
