"""The operator's Prometheus metrics.

The operator's other modules write them, and `health` serves them. This module has no other state.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

disable_created_metrics()  # type: ignore[no-untyped-call]

_START_BUCKETS_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)
_LATENCY_BUCKETS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What is exposed of one InferenceService. The builder limits the number of entries."""

    conditions: tuple[tuple[str, str, str], ...]
    """Type, status and reason of each condition."""
    replicas: Mapping[str, int]
    """Numbers of replicas by what they count."""


class ServiceStates(Collector):
    """The state of each InferenceService, as series that are built at the scrape.

    A state replaces the former one whole, so that no series with an old reason stays.
    """

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], ServiceState] = {}

    def put(self, namespace: str, name: str, state: ServiceState) -> None:
        self._states[namespace, name] = state

    def has(self, namespace: str, name: str) -> bool:
        return (namespace, name) in self._states

    def drop(self, namespace: str, name: str) -> None:
        self._states.pop((namespace, name), None)

    def collect(self) -> Iterator[GaugeMetricFamily]:
        service = ["namespace", "inference_service"]
        conditions = GaugeMetricFamily(
            "conveyor_operator_condition",
            "1 for the present status and reason of each condition of an InferenceService.",
            labels=[*service, "type", "status", "reason"],
        )
        replicas = GaugeMetricFamily(
            "conveyor_operator_replicas",
            "Replicas of an InferenceService: desired, ready, and with autoscaling the maximum.",
            labels=[*service, "of"],
        )
        for key, state in self._states.items():
            for condition in state.conditions:
                conditions.add_metric([*key, *condition], 1)
            for of, count in state.replicas.items():
                replicas.add_metric([*key, of], count)
        yield conditions
        yield replicas


class LostSpans(Collector):
    """Counts lost spans by `count`, which `process` sets if traces are exported."""

    def __init__(self) -> None:
        self.count: Callable[[], int] = lambda: 0

    def collect(self) -> Iterator[CounterMetricFamily]:
        text = "Sampled spans that no collector got."
        yield CounterMetricFamily("conveyor_operator_lost_spans", text, value=self.count())


class Metrics:
    """The metrics of a process. Each test makes its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.leader = Gauge(
            "conveyor_operator_leader",
            "1 on the leader; 0 on an operator that stands by, which exports no other metric.",
            registry=self.registry,
        )
        self.reconciles = Counter(
            "conveyor_operator_reconciles",
            "Reconciles by result: done, retry (a child was refused) or error.",
            ["result"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "conveyor_operator_reconcile_seconds",
            "Duration of one reconcile.",
            buckets=_LATENCY_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.queue_depth = Gauge(
            "conveyor_operator_queue_depth",
            "InferenceServices waiting for a free worker.",
            registry=self.registry,
        )
        self.busy_workers = Gauge(
            "conveyor_operator_busy_workers",
            "InferenceServices being reconciled now.",
            registry=self.registry,
        )
        self.pod_seconds = Counter(
            "conveyor_operator_pod_seconds",
            "Time that engine pods were on nodes, used or not.",
            ["namespace", "inference_service"],
            registry=self.registry,
        )
        self.api_calls = Counter(
            "conveyor_operator_api_calls",
            "Calls to the API server except watches, by verb, resource and HTTP status (0: no response).",
            ["verb", "resource", "status"],
            registry=self.registry,
        )
        self.api_wait_seconds = Counter(
            "conveyor_operator_api_wait_seconds",
            "Time that calls to the API server waited for the operator's own limit (--api-calls-per-second).",
            registry=self.registry,
        )
        self.unreadable_objects = Counter(
            "conveyor_operator_unreadable_objects",
            "Objects from watches that were skipped because they could not be parsed, by resource.",
            ["resource"],
            registry=self.registry,
        )
        self.unreadable_gateways = Gauge(
            "conveyor_operator_unreadable_gateways",
            "Gateways whose report about services to start or stop could not be read at the last poll.",
            registry=self.registry,
        )
        self.pod_start_seconds = Histogram(
            "conveyor_operator_pod_start_seconds",
            "Time from the creation of an engine pod until it was ready, whole and by part.",
            ["part"],
            buckets=_START_BUCKETS_SECONDS,
            registry=self.registry,
        )
        self.certificate_expiry = Gauge(
            "conveyor_operator_metrics_certificate_expiry_timestamp_seconds",
            "When the metrics server's serving certificate expires; 0 without a certificate.",
            registry=self.registry,
        )
        self.lost_spans = LostSpans()
        self.registry.register(self.lost_spans)
        self.services = ServiceStates()
        self.registry.register(self.services)

    def put_service(self, namespace: str, name: str, state: ServiceState) -> None:
        """Set what is exposed of a service. The time of its pods begins at 0, so that the first increase counts."""
        self.services.put(namespace, name, state)
        self.pod_seconds.labels(namespace, name)

    def count_pods(self, seconds: Mapping[str, float]) -> None:
        """Count how long pods were on nodes, by service (`namespace/name`). Services that are gone have no series."""
        for service, each in seconds.items():
            namespace, _, name = service.partition("/")
            if self.services.has(namespace, name):
                self.pod_seconds.labels(namespace, name).inc(each)

    def drop_service(self, namespace: str, name: str) -> None:
        """Remove the series of a service that no longer exists."""
        self.services.drop(namespace, name)
        self.pod_seconds.remove(namespace, name)
