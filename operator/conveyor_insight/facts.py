"""What one InferenceService's scaling depends on, as the API server has it at this moment. Read for `explaining`.

Read through a `Reader`, whose user needs the right to get what is asked for.
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

Object = Mapping[str, Any]

# Where an HPA reads Conveyor's own metrics, and KEDA's.
_OBJECTS: Final = f"/apis/{names.METRICS_GROUP}/{names.METRICS_VERSIONS[0]}"
_EXTERNAL: Final = "/apis/external.metrics.k8s.io/v1beta1"


class Unanswered(Exception):
    """The cluster does not answer; the sentence says why."""


class Reader(Protocol):
    """A cluster that answers GET. Both raise Unanswered."""

    def get(self, path: str, query: Mapping[str, str] = ...) -> Object: ...

    def find(self, path: str) -> Object | None:
        """None if there is no such object."""


@dataclass(frozen=True, slots=True)
class Facts:
    """`autoscaler` is Conveyor's HPA, or KEDA's of its ScaledObject; `others` names those of somebody else. A value
    that could not be read is the sentence that says why."""

    service: InferenceService
    now: datetime
    deployment: DeploymentState | None = None
    autoscaler: Object | None = None
    others: tuple[str, ...] = ()
    values: Mapping[str, int | str] = field(default_factory=dict)


def read_facts(cluster: Reader, namespace: str, name: str) -> Facts:
    """Raises Unanswered, also where there is no such InferenceService."""
    body = cluster.find(INFERENCE_SERVICE.path(namespace, name))
    if body is None:
        raise Unanswered(f"there is no InferenceService {name} in namespace {namespace}")
    try:
        service = InferenceService.parse(body)
    except InvalidResource as error:
        raise Unanswered(f"InferenceService {name} is invalid: {error}") from error
    deployment = cluster.find(DEPLOYMENT.path(namespace, names.engine_name(name)))
    autoscalers = cluster.get(AUTOSCALER.path(namespace))["items"]
    ours = next((hpa for hpa in autoscalers if _is_ours(hpa, name)), None)
    return Facts(
        service=service,
        now=datetime.now(UTC),
        deployment=None if deployment is None else observe_deployment(deployment),
        autoscaler=ours,
        others=tuple(hpa["metadata"]["name"] for hpa in autoscalers if hpa is not ours and _scales(hpa, name)),
        values=dict(_read_values(cluster, namespace, name, ours)),
    )


def _is_ours(hpa: Object, name: str) -> bool:
    """KEDA gives its own the labels of the ScaledObject that it is made of."""
    metadata, kinds = hpa["metadata"], (names.KIND, SCALED_OBJECT.kind)
    is_owned = any(owner["kind"] in kinds for owner in metadata.get("ownerReferences") or ())
    return is_owned and bool(metadata["name"] == names.engine_name(name))


def _scales(hpa: Object, name: str) -> bool:
    target = hpa["spec"]["scaleTargetRef"]
    return (target["kind"], target["name"]) in ((names.KIND, name), (DEPLOYMENT.kind, names.engine_name(name)))


def _read_values(cluster: Reader, namespace: str, name: str, hpa: Object | None) -> Iterator[tuple[str, int | str]]:
    """As the HorizontalPodAutoscaler asks for them; nothing where there is none."""
    metrics = [] if hpa is None else hpa["spec"].get("metrics") or []
    places = {
        "Object": (f"{_OBJECTS}/namespaces/{namespace}/{names.CRD_NAME}/{name}", "metricLabelSelector"),
        "External": (f"{_EXTERNAL}/namespaces/{namespace}", "labelSelector"),
    }
    for metric in [metric for metric in metrics if metric["type"] in places]:
        source, (path, parameter) = metric[metric["type"].lower()], places[metric["type"]]
        asked, metric_name = source["metric"], name_metric(source)
        labels = (asked.get("selector") or {}).get("matchLabels") or {}
        query = {parameter: ",".join(f"{key}={value}" for key, value in labels.items())} if labels else {}
        try:
            found = cluster.get(f"{path}/{asked['name']}", query)
            yield metric_name, int(parse_quantity(found["items"][0]["value"]))
        except Unanswered as error:
            yield metric_name, str(error)
        except (LookupError, TypeError, ValueError) as error:
            yield metric_name, f"the answer is no value: {error!r}"
