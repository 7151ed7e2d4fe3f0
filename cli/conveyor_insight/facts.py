"""Reads from the API server everything on which an InferenceService's scaling depends. Used by `explaining`.

The objects and metrics are read through a `Reader`, whose user must have the right to get them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

from conveyor_api import names
from conveyor_api.errors import InvalidResource
from conveyor_api.quantities import parse_quantity
from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.kinds import INFERENCE_SERVICE
from conveyor_operator.inferenceservice.observed import DeploymentState, name_metric, observe_deployment
from conveyor_operator.kinds import AUTOSCALER, DEPLOYMENT, SCALED_OBJECT
from conveyor_protocol.limit_reasons import LimitReason

Object = Mapping[str, Any]

# API paths: `_OBJECTS` for Conveyor's metrics, and `_EXTERNAL` for KEDA's metrics.
_OBJECTS: Final = f"/apis/{names.METRICS_GROUP}/{names.METRICS_VERSIONS[0]}"
_OF_CLASS: Final = (names.CLASS_QUEUED_METRIC, names.CLASS_WAIT_METRIC)
_EXTERNAL: Final = "/apis/external.metrics.k8s.io/v1beta1"


class Unanswered(Exception):
    """The cluster does not respond, or its response is an error. The message has the reason."""


class Reader(Protocol):
    """Sends GET requests to the cluster. Both methods raise Unanswered."""

    def get(self, path: str, query: Mapping[str, str] = ...) -> Object: ...

    def find(self, path: str) -> Object | None:
        """Return the object, or None if it does not exist."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts about one service. If a metric could not be read, its value is a string that says why.

    `autoscaler` is Conveyor's HPA, or KEDA's HPA for Conveyor's ScaledObject. `others` has the names of all other HPAs.
    """

    service: InferenceService
    now: datetime
    deployment: DeploymentState | None = None
    autoscaler: Object | None = None
    others: tuple[str, ...] = ()
    values: Mapping[str, int | str] = field(default_factory=dict)
    classes: tuple["ClassFacts", ...] = ()
    limits: "LimitFacts | None" = None
    """None for a service without `batching.objectives`."""
    counts: "Counts | None" = None
    """None at zero, without an autoscaler of Conveyor's, or if they could not be read."""


@dataclass(frozen=True, slots=True)
class Counts:
    """The counts behind the two metrics, without regard to starting engines."""

    requests: int
    """Queued in gateways or sent to engines."""
    waiting: int
    """Waiting for a place in a batch."""


@dataclass(frozen=True, slots=True)
class ClassFacts:
    """One class of the queue. Lists begin with the most urgent class.

    If a value could not be read, it is a string that says why.
    """

    name: str
    level: int
    queued: int | str
    wait_seconds: int | str


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """The limits of engines with objectives. If a value could not be read, `running` is a string that says why."""

    running: int | str
    """How many requests an engine may run at once: the mean over engines with requests."""
    engines: Mapping[str, int]
    """For each reason of a limit, the number of engines that have requests and this limit. Zeros are left out."""


def read_facts(cluster: Reader, namespace: str, name: str) -> Facts:
    """Read the facts about a service. Raises Unanswered, also if there is no such InferenceService."""
    body = cluster.find(INFERENCE_SERVICE.path(namespace, name))
    if body is None:
        raise Unanswered(f"there is no InferenceService {name} in namespace {namespace}")
    try:
        service = InferenceService.parse(body)
    except InvalidResource as error:
        raise Unanswered(f"InferenceService {name} is invalid: {error}") from error
    deployment = cluster.find(DEPLOYMENT.path(namespace, names.engine_name(name)))
    state = None if deployment is None else observe_deployment(deployment)
    autoscalers = cluster.get(AUTOSCALER.path(namespace))["items"]
    ours = next((hpa for hpa in autoscalers if _is_ours(hpa, name)), None)
    return Facts(
        service=service,
        now=datetime.now(UTC),
        deployment=state,
        autoscaler=ours,
        others=tuple(hpa["metadata"]["name"] for hpa in autoscalers if hpa is not ours and _scales(hpa, name)),
        values=dict(_read_values(cluster, namespace, name, ours)),
        classes=tuple(
            ClassFacts(
                each.name, each.level, *(_read_class(cluster, service, each.name, metric) for metric in _OF_CLASS)
            )
            for each in service.spec.queue.ordered_classes
        ),
        limits=None if service.spec.batching.objectives is None else _read_limits(cluster, service),
        counts=_read_counts(cluster, service) if ours and state and state.requested_replicas else None,
    )


def _read_counts(cluster: Reader, service: InferenceService) -> Counts | None:
    requests, waiting = (_read_own(cluster, service, each) for each in (names.REQUESTS_METRIC, names.WAITING_METRIC))
    return Counts(requests, waiting) if isinstance(requests, int) and isinstance(waiting, int) else None


def _read_class(cluster: Reader, service: InferenceService, class_name: str, metric: str) -> int | str:
    return _read_own(cluster, service, metric, f"{names.CLASS_LABEL}={class_name}")


def _read_limits(cluster: Reader, service: InferenceService) -> LimitFacts:
    running = _read_own(cluster, service, names.RUNNING_LIMIT_METRIC)
    if isinstance(running, str):
        return LimitFacts(running, {})
    counts = {
        str(reason): _read_own(cluster, service, names.LIMITED_ENGINES_METRIC, f"{names.LIMIT_LABEL}={reason}")
        for reason in LimitReason
    }
    problem = next((count for count in counts.values() if isinstance(count, str)), None)
    return LimitFacts(
        running if problem is None else problem, {r: n for r, n in counts.items() if isinstance(n, int) and n}
    )


def _read_own(cluster: Reader, service: InferenceService, metric: str, selector: str = "") -> int | str:
    """Return the value of one of Conveyor's metrics for the service, or the sentence that says why it is missing."""
    path = f"{_OBJECTS}/namespaces/{service.namespace}/{names.CRD_NAME}/{service.name}/{metric}"
    return _read_value(cluster, path, {"metricLabelSelector": selector} if selector else {})


def _is_ours(hpa: Object, name: str) -> bool:
    """Return whether the HPA is Conveyor's, or KEDA's HPA for Conveyor's ScaledObject.

    The kind of the HPA's owner and the HPA's name decide.
    """
    metadata, kinds = hpa["metadata"], (names.KIND, SCALED_OBJECT.kind)
    is_owned = any(owner["kind"] in kinds for owner in metadata.get("ownerReferences") or ())
    return is_owned and bool(metadata["name"] == names.engine_name(name))


def _scales(hpa: Object, name: str) -> bool:
    target = hpa["spec"]["scaleTargetRef"]
    return (target["kind"], target["name"]) in ((names.KIND, name), (DEPLOYMENT.kind, names.engine_name(name)))


def _read_values(cluster: Reader, namespace: str, name: str, hpa: Object | None) -> Iterator[tuple[str, int | str]]:
    """Read the metrics with the queries that the HorizontalPodAutoscaler sends. Yield nothing without an autoscaler."""
    metrics = [] if hpa is None else hpa["spec"].get("metrics") or []
    places = {
        "Object": (f"{_OBJECTS}/namespaces/{namespace}/{names.CRD_NAME}/{name}", "metricLabelSelector"),
        "External": (f"{_EXTERNAL}/namespaces/{namespace}", "labelSelector"),
    }
    for metric in [metric for metric in metrics if metric["type"] in places]:
        source, (path, parameter) = metric[metric["type"].lower()], places[metric["type"]]
        selected, metric_name = source["metric"], name_metric(source)
        labels = (selected.get("selector") or {}).get("matchLabels") or {}
        query = {parameter: ",".join(f"{key}={value}" for key, value in labels.items())} if labels else {}
        yield metric_name, _read_value(cluster, f"{path}/{selected['name']}", query)


def _read_value(cluster: Reader, path: str, query: Mapping[str, str]) -> int | str:
    """Return the value of the metric at the path, or the sentence that says why it cannot be read."""
    try:
        return int(parse_quantity(cluster.get(path, query)["items"][0]["value"]))
    except Unanswered as error:
        return str(error)
    except (LookupError, TypeError, ValueError) as error:
        return f"the response is not a metric value: {error!r}"
