"""The observed children of an InferenceService: small frozen values instead of whole objects. Pure.

`project` converts each watched object to the value that the `store` keeps. `observe` collects these values for one
reconcile.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conveyor_api import names
from conveyor_api.autoscaling import MAX_REPLICAS
from conveyor_api.text import clip
from conveyor_operator.inferenceservice.kinds import CHILDREN
from conveyor_operator.inferenceservice.pods import PodState, observe_pod, parse_message
from conveyor_operator.inferenceservice.replica_sets import (
    TEMPLATE_HASH_ANNOTATION,
    ReplicaSetState,
    hash_pod_template,
    observe_replica_set,
)
from conveyor_operator.kinds import (
    AUTOSCALER,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    POD,
    REPLICA_SET,
    SCALED_OBJECT,
    Key,
    ObjectKind,
)
from conveyor_operator.loop.child import Child, ChildId, observe_child
from conveyor_operator.loop.store import Store
from conveyor_operator.usage.held_pods import HeldPod

Object = Mapping[str, Any]

HELD_REPLICAS_ANNOTATION = f"{names.GROUP}/held-replicas"

REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
LABELS = tuple(names.child_labels(""))
ROLLED_BACK_ANNOTATION = f"{names.GROUP}/rolled-back"
_DEFAULT_REPLICAS = 1
# By the type of an HPA's metric: the field with its content. Conveyor's HPA has metrics of the type Object. KEDA's HPA
# has metrics of the type External.
_SOURCES = {"Object": "object", "External": "external"}
_DEFAULT_TOLERANCE = "0.1"  # Kubernetes' own

Conditions = Mapping[str, tuple[str, str, str]]
"""type -> (status, reason, message)"""

ClaimModes = Mapping[str, tuple[str, ...]]
"""Access modes of bound claims, by name: () for an unbound claim. Claims that do not exist are left out."""


@dataclass(frozen=True, slots=True)
class RolledBack:
    """Why the Deployment has an earlier pod template than the desired one. Kept in its ROLLED_BACK_ANNOTATION."""

    attempt: str
    """Identifies the rollout that failed. It is not tried again until this changes."""
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The engine's Deployment: its desired replicas and who set them, its template, and its progress."""

    generation: int = 0
    observed_generation: int = 0
    requested_replicas: int = _DEFAULT_REPLICAS
    replicas_managers: frozenset[str] = frozenset()
    """Field managers that own spec.replicas; empty if the API server has set its default."""
    template_hash: str = ""
    engine_image: str = ""
    config_hash: str = ""
    """Hash of the configuration in its pod template."""
    pod_template: str = ""
    """Hash of the pod template in the API server. The newest ReplicaSet has the same hash."""
    held_replicas: str = ""
    """The number in HELD_REPLICAS_ANNOTATION; "" if there is none that a service could have."""
    rolled_back: RolledBack | None = None
    max_surge: int | str = 0
    """Additional pods during a rollout: a number or a percentage."""
    revision: int = 0
    """Number of pod templates that its controller has seen."""
    replicas: int = 0
    updated_replicas: int = 0
    ready_replicas: int = 0
    available_replicas: int = 0
    conditions: Conditions = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether its pods are the first ones and replace no others."""
        return self.revision <= 1 and self.updated_replicas == self.replicas

    @property
    def replaces_pods(self) -> bool:
        """Whether pods of an earlier template still exist."""
        return self.updated_replicas < self.replicas

    @property
    def rolled_out(self) -> bool:
        """Whether all pods of the latest template have been available, and no other pods exist.

        The latest template is the one that the Deployment's controller saw last. The controller reports the end of a
        rollout. The value stays True while the Deployment scales and if a pod fails.
        """
        progress = self.conditions.get("Progressing", ("", "", ""))[1]
        return progress == "NewReplicaSetAvailable" and self.updated_replicas == self.replicas

    @property
    def complete(self) -> bool:
        """Whether it is rolled out, and all desired pods are available."""
        seen = self.observed_generation >= self.generation
        return seen and self.updated_replicas == self.available_replicas == self.replicas == self.requested_replicas


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """Conveyor's or KEDA's HPA: its limits, its desired replicas, its metrics and its conditions."""

    min_replicas: int = 1
    max_replicas: int = 1
    current_replicas: int = 0
    desired_replicas: int = 0
    targets: Mapping[str, str] = field(default_factory=dict)
    currents: Mapping[str, str] = field(default_factory=dict)
    """metric -> current value for each replica, as a quantity"""
    conditions: Conditions = field(default_factory=dict)
    tolerance_up: str = _DEFAULT_TOLERANCE
    tolerance_down: str = _DEFAULT_TOLERANCE
    """Ratios, as quantities, by which a metric may differ from its target without scaling."""
    inactive_since: str = ""
    """When it could no longer read its metrics; "" if it can."""


@dataclass(frozen=True, slots=True)
class Observed:
    """All that is known of one InferenceService's children at one moment."""

    children: Mapping[ChildId, Child] = field(default_factory=dict)
    deployment: DeploymentState | None = None
    autoscaler: AutoscalerState | None = None
    scaled_object: Conditions | None = None
    """The conditions that KEDA reports for the ScaledObject; None if it does not exist."""
    pods: tuple[PodState, ...] = ()
    """The engine pods."""
    ready_endpoints: int = 0
    prewarm_pods: tuple[PodState, ...] = ()
    replica_sets: tuple[ReplicaSetState, ...] = ()
    check_pods: tuple[PodState, ...] = ()

    @property
    def newest(self) -> ReplicaSetState | None:
        """The ReplicaSet of the Deployment's pod template; None until the Deployment's controller has created it."""
        wanted = self.deployment.pod_template if self.deployment is not None else ""
        return next((each for each in self.replica_sets if each.template == wanted), None)

    @property
    def newest_pods(self) -> list[PodState]:
        """Pods of the Deployment's pod template that are not terminating. Others do not belong to the current spec."""
        newest = self.newest
        return [pod for pod in self.pods if newest and pod.template_label == newest.pods_label and not pod.leaving]

    @property
    def refused(self) -> str:
        """Why the newest ReplicaSet cannot create a pod; "" if it can."""
        return self.newest.refused if self.newest is not None else ""

    @property
    def lacks_quota(self) -> bool:
        """Whether a quota refused a pod, which may be created once another pod is deleted."""
        return "exceeded quota" in self.refused

    def with_child(self, body: Object) -> "Observed":
        """Return a copy with one child replaced by `body`, which the API server has just returned."""
        child = observe_child(body, LABELS)
        changed = replace(self, children={**self.children, (child.kind, child.name): child})
        if child.kind == DEPLOYMENT.kind:
            return replace(changed, deployment=observe_deployment(body))
        if child.kind == AUTOSCALER.kind:
            return replace(changed, autoscaler=observe_autoscaler(body))
        if child.kind == SCALED_OBJECT.kind:
            return replace(changed, scaled_object=observe_scaled_object(body))
        return changed

    def without_child(self, id: ChildId) -> "Observed":
        """Return a copy without a child that was deleted."""
        left = replace(self, children={key: child for key, child in self.children.items() if key != id})
        if id[0] == SCALED_OBJECT.kind:
            return replace(left, scaled_object=None)
        return replace(left, autoscaler=None) if id[0] == AUTOSCALER.kind else left


def project(kind: ObjectKind, key: Key, body: Object) -> Any:
    """Return what the store keeps of an object.

    The state of a Deployment, HPA or ScaledObject is kept only if the object has the engine's name.
    """
    if kind in _PROJECTIONS:
        return _PROJECTIONS[kind](body)
    observe_state = _STATES.get(kind)
    is_engines = body["metadata"]["name"] == names.engine_name(key.name)
    return observe_child(body, LABELS), observe_state(body) if observe_state and is_engines else None


def observe(store: Store, key: Key) -> Observed:
    """Collect all objects with the label of this InferenceService."""
    children: dict[ChildId, Child] = {}
    states: dict[ObjectKind, Any] = {}
    for kind in CHILDREN:
        for child, state in store.values(kind, key):
            children[child.kind, child.name] = child
            if child.name == names.engine_name(key.name):  # other objects may have the label, too
                states[kind] = state
    pods: list[PodState] = sorted(store.values(POD, key), key=lambda pod: pod.name)
    ready_endpoints = sum(store.values(ENDPOINT_SLICE, key))
    return Observed(
        children,
        states.get(DEPLOYMENT),
        states.get(AUTOSCALER),
        states.get(SCALED_OBJECT),
        tuple(pod for pod in pods if not (pod.prewarms or pod.checks)),
        ready_endpoints,
        tuple(pod for pod in pods if pod.prewarms),
        tuple(store.values(REPLICA_SET, key)),
        tuple(pod for pod in pods if pod.checks),
    )


def list_held_pods(store: Store) -> list[HeldPod]:
    """Return the engine pods of all InferenceServices that are on nodes and have not ended."""
    return [
        HeldPod(f"{key.namespace}/{key.name}", since_unix)
        for key in store.resources(POD)
        for pod in store.values(POD, key)
        if (since_unix := pod.held_since_unix) is not None
    ]


def observe_deployment(body: Object) -> DeploymentState:
    spec, status, metadata = body["spec"], body.get("status") or {}, body["metadata"]
    annotations, template = metadata.get("annotations") or {}, spec["template"]["metadata"]
    return DeploymentState(
        generation=int(metadata.get("generation", 0)),
        observed_generation=int(status.get("observedGeneration", 0)),
        requested_replicas=int(spec.get("replicas", _DEFAULT_REPLICAS)),
        replicas_managers=_replicas_managers(metadata),
        template_hash=str(annotations.get(TEMPLATE_HASH_ANNOTATION, "")),
        engine_image=_own_image(spec["template"]["spec"]),
        config_hash=str((template.get("annotations") or {}).get(names.CONFIG_HASH_ANNOTATION, "")),
        pod_template=hash_pod_template(spec["template"]),
        held_replicas=_read_held(str(annotations.get(HELD_REPLICAS_ANNOTATION, ""))),
        rolled_back=_read_rolled_back(str(annotations.get(ROLLED_BACK_ANNOTATION, ""))),
        max_surge=((spec.get("strategy") or {}).get("rollingUpdate") or {}).get("maxSurge", 0),
        revision=_whole(annotations.get(REVISION_ANNOTATION)),
        replicas=int(status.get("replicas", 0)),
        updated_replicas=int(status.get("updatedReplicas", 0)),
        ready_replicas=int(status.get("readyReplicas", 0)),
        available_replicas=int(status.get("availableReplicas", 0)),
        conditions=_conditions(status),
    )


def _own_image(pods: Object) -> str:
    """Return the image of Conveyor's engine, which downloads the model for every runtime."""
    return str(next(iter(pods.get("initContainers") or [{}])).get("image", ""))


def observe_autoscaler(body: Object) -> AutoscalerState:
    spec, status = body["spec"], body.get("status") or {}
    targets = _read_averages(spec.get("metrics"), "target")
    currents = _read_averages(status.get("currentMetrics"), "current")
    return AutoscalerState(
        min_replicas=int(spec.get("minReplicas", 1)),
        max_replicas=int(spec["maxReplicas"]),
        current_replicas=int(status.get("currentReplicas", 0)),
        desired_replicas=int(status.get("desiredReplicas", 0)),
        targets=targets,
        currents={name: value for name, value in currents.items() if value},
        conditions=_conditions(status),
        tolerance_up=_tolerance(spec, "scaleUp"),
        tolerance_down=_tolerance(spec, "scaleDown"),
        inactive_since=_find_inactive_since(status),
    )


def _find_inactive_since(status: Object) -> str:
    active: Object = next((c for c in status.get("conditions") or () if c["type"] == "ScalingActive"), {})
    return str(active.get("lastTransitionTime") or "") if active.get("status") == "False" else ""


def _read_averages(metrics: Sequence[Object] | None, member: str) -> dict[str, str]:
    sources = [metric[_SOURCES[metric["type"]]] for metric in metrics or () if metric.get("type") in _SOURCES]
    return {name_metric(source): str(source[member].get("averageValue", "")) for source in sources}


def name_metric(source: Object) -> str:
    """Return Conveyor's name of a metric, without the prefix that KEDA adds."""
    return str(source["metric"]["name"]).rpartition(names.KEDA_METRIC_PREFIX)[2]


def observe_scaled_object(body: Object) -> Conditions:
    return _conditions(body.get("status") or {})


def observe_ready_endpoints(body: Object) -> int:
    """Return the number of ready endpoints in an EndpointSlice. An unset `ready` counts as ready, as in the API.

    Pods without the Service's port, which have TLS if no others do or the reverse, are in a slice without ports.
    """
    if not any(port.get("name") == names.ENGINE_PORT_NAME for port in body.get("ports") or ()):
        return 0
    endpoints = body.get("endpoints") or ()
    return sum(1 for e in endpoints if (e.get("conditions") or {}).get("ready") is not False)


def _tolerance(spec: Object, direction: str) -> str:
    rules = (spec.get("behavior") or {}).get(direction) or {}
    return str(rules.get("tolerance", _DEFAULT_TOLERANCE))


def _read_held(text: str) -> str:
    """Return the number of replicas in the annotation; "" for anything else. Who edits Deployments can set it."""
    return text if text.isascii() and text.isdecimal() and len(text) <= 4 and int(text) <= MAX_REPLICAS else ""


def _read_rolled_back(text: str) -> RolledBack | None:
    """Return the annotation's content; None for any other text. Who edits Deployments can set it."""
    fields = parse_message(text)
    attempt, reason, message = (fields.get(key) for key in ("attempt", "reason", "message"))
    if not (isinstance(attempt, str) and isinstance(reason, str) and isinstance(message, str)):
        return None
    return RolledBack(attempt[:64], reason[:64], clip(message))


def _whole(text: object) -> int:
    """Return an annotation as a number; 0 if it is not a number of up to nine digits, because anybody may edit it."""
    return int(str(text)) if str(text).isdecimal() and len(str(text)) < 10 else 0


def _conditions(status: Object) -> dict[str, tuple[str, str, str]]:
    return {
        c["type"]: (str(c["status"]), str(c.get("reason", "")), str(c.get("message", "")))
        for c in status.get("conditions") or ()
    }


def _replicas_managers(metadata: Object) -> frozenset[str]:
    return frozenset(
        str(entry.get("manager", ""))
        for entry in metadata.get("managedFields") or ()
        if "f:replicas" in (entry.get("fieldsV1") or {}).get("f:spec", {})
    )


_STATES: dict[ObjectKind, Callable[[Object], Any]] = {
    DEPLOYMENT: observe_deployment,
    AUTOSCALER: observe_autoscaler,
    SCALED_OBJECT: observe_scaled_object,
}
_PROJECTIONS: dict[ObjectKind, Callable[[Object], Any]] = {
    POD: observe_pod,
    REPLICA_SET: observe_replica_set,
    ENDPOINT_SLICE: observe_ready_endpoints,
}
