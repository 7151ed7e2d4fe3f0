"""The collections of watched objects, and the fields of objects that are read.

The gateway watches all of them. The operator watches ServedNames and the gateways' EndpointSlices. The metrics server
watches only the gateways' EndpointSlices.
"""

from typing import Any, NotRequired, TypedDict

from conveyor_api.names import (
    API_KEY_PLURAL,
    GROUP,
    INFERENCE_SERVICE_LABEL,
    PLURAL,
    SERVED_NAME_PLURAL,
    UNSERVED_ANNOTATION,
    VERSION,
)
from conveyor_kube.wanted_json import Identity
from conveyor_kube.watch import Collection


class _DatedMetadata(Identity):
    creationTimestamp: NotRequired[str | None]
    generation: NotRequired[Any]


class _Engine(TypedDict):
    maxModelLen: NotRequired[Any]
    image: NotRequired[Any]
    device: NotRequired[Any]  # a rule of the spec compares it with `speculation`


class _Autoscaling(TypedDict):
    minReplicas: NotRequired[Any]
    maxReplicas: Any
    idleTimeout: NotRequired[Any]
    provider: NotRequired[Any]
    targetUtilizationPercent: NotRequired[Any]
    queueDepthPerReplica: NotRequired[Any]


class _ServiceSpec(TypedDict):
    model: Any
    task: NotRequired[Any]
    adapters: NotRequired[Any]
    runtime: NotRequired[Any]
    listed: NotRequired[Any]
    access: NotRequired[Any]
    engine: NotRequired[_Engine | None]
    batching: NotRequired[Any]
    kvCache: NotRequired[Any]
    workload: NotRequired[Any]
    queue: NotRequired[Any]
    requestTimeout: NotRequired[Any]
    autoscaling: NotRequired[_Autoscaling | None]


class _Condition(TypedDict):
    type: str
    status: str
    reason: str
    lastTransitionTime: str


class _ServiceStatus(TypedDict):
    observedGeneration: NotRequired[Any]
    conditions: NotRequired[list[_Condition] | None]
    model: NotRequired[Any]
    desiredReplicas: NotRequired[Any]
    startingReplicas: NotRequired[Any]
    startingUntil: NotRequired[Any]
    adapters: NotRequired[Any]


class ServiceBody(TypedDict):
    """An InferenceService."""

    metadata: _DatedMetadata
    spec: _ServiceSpec
    status: NotRequired[_ServiceStatus | None]


# Only this label is kept, because an object may have any number of labels.
_SliceLabels = TypedDict("_SliceLabels", {INFERENCE_SERVICE_LABEL: NotRequired[str]})  # type: ignore[misc]


class _SliceMetadata(Identity):
    labels: NotRequired[_SliceLabels]


class SliceBody(TypedDict):
    """An EndpointSlice."""

    metadata: _SliceMetadata
    addressType: str
    ports: NotRequired[list[Any] | None]
    endpoints: NotRequired[list["_Endpoint"] | None]


class _Endpoint(TypedDict):
    addresses: list[str]
    conditions: NotRequired[dict[str, bool | None] | None]
    targetRef: NotRequired["_Target | None"]


class _Target(TypedDict):
    name: NotRequired[str | None]
    uid: NotRequired[str | None]


_ClaimAnnotations = TypedDict("_ClaimAnnotations", {UNSERVED_ANNOTATION: NotRequired[str]})  # type: ignore[misc]


class _ClaimMetadata(_DatedMetadata):
    uid: str
    annotations: NotRequired[_ClaimAnnotations]


class ClaimBody(TypedDict):
    """A ServedName."""

    metadata: _ClaimMetadata
    spec: Any


class KeyBody(TypedDict):
    """An APIKey."""

    metadata: Identity
    spec: Any


def service_collection(namespace: str) -> Collection:
    """Return the collection of InferenceServices in a namespace; "" for all namespaces."""
    return Collection(GROUP, VERSION, PLURAL, namespace, shape=ServiceBody)


def slice_collection(namespace: str, label_selector: str = INFERENCE_SERVICE_LABEL) -> Collection:
    """Return the collection of EndpointSlices that `label_selector` selects; by default those of engines."""
    return Collection("discovery.k8s.io", "v1", "endpointslices", namespace, label_selector, shape=SliceBody)


def claim_collection(namespace: str) -> Collection:
    """Return the collection of ServedNames in a namespace; "" for all namespaces."""
    return Collection(GROUP, VERSION, SERVED_NAME_PLURAL, namespace, shape=ClaimBody)


def key_collection(namespace: str) -> Collection:
    """Return the collection of APIKeys in a namespace; "" for all namespaces."""
    return Collection(GROUP, VERSION, API_KEY_PLURAL, namespace, shape=KeyBody)
