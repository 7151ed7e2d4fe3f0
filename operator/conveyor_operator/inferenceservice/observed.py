"""What the operator remembers of the objects it watches: small frozen values instead of whole objects.

`watches` projects every watched object with `observe_*` into the `store`; `reconcile` and the pure parts that it asks
read the result. Dictionaries in, dataclasses out. Must not call anything.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from conveyor_api import names
from conveyor_operator.inferenceservice.pods import PodState

Object = Mapping[str, Any]

TEMPLATE_HASH_ANNOTATION = f"{names.GROUP}/template-hash"
HELD_REPLICAS_ANNOTATION = f"{names.GROUP}/held-replicas"

# Written by Kubernetes' own controllers; not a change anybody made.
REVISION_ANNOTATION = "deployment.kubernetes.io/revision"
_CONTROLLER_ANNOTATIONS = (REVISION_ANNOTATION, "pv.kubernetes.io/", "volume.kubernetes.io/")
_DEFAULT_REPLICAS = 1


@dataclass(frozen=True, slots=True)
class Child:
    """One existing child: whose it is, and what it says, as a fingerprint."""

    kind: str
    name: str
    uid: str
    fingerprint: str
    """Hash of all that is neither status nor written by the API server: unchanged means nobody touched it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of those that every child of ours has."""
    controller: str = ""
    """`Kind/name` of the controlling owner, empty without one."""
    controller_uid: str = ""
    access_mode: str = ""
    """Claims: how they may be mounted; cannot change any more."""


@dataclass(frozen=True, slots=True)
class DeploymentState:
    """The engine's Deployment: what is asked, by whom, and how far it got."""

    generation: int = 0
    observed_generation: int = 0
    asked_replicas: int = _DEFAULT_REPLICAS
    replicas_managers: frozenset[str] = frozenset()
    """Field managers that own spec.replicas; empty when it is only the API server's default."""
    template_hash: str = ""
    engine_image: str = ""
    config_hash: str = ""
    """The configuration that its pods are asked to have."""
    held_replicas: str = ""
    revision: int = 0
    """How many pod templates it has had, as far as its controller has seen."""
    replicas: int = 0
    updated_replicas: int = 0
    ready_replicas: int = 0
    available_replicas: int = 0
    conditions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    """type -> (status, reason, message)"""

    @property
    def is_first(self) -> bool:
        """Its pods are the first, and replace none."""
        return self.revision <= 1 and self.updated_replicas == self.replicas

    @property
    def rolled_out(self) -> bool:
        """All pods of the template that its controller saw last have been available, and no other pod is left.

        Its controller says so once, when a rollout is over, and keeps to it while it scales and when a pod fails.
        """
        progress = self.conditions.get("Progressing", ("", "", ""))[1]
        return progress == "NewReplicaSetAvailable" and self.updated_replicas == self.replicas

    @property
    def complete(self) -> bool:
        """Rolled out, and all that is asked for is available."""
        seen = self.observed_generation >= self.generation
        return seen and self.updated_replicas == self.available_replicas == self.replicas == self.asked_replicas


@dataclass(frozen=True, slots=True)
class AutoscalerState:
    """The HPA: its bounds, its wish, and what it says about itself."""

    min_replicas: int = 1
    max_replicas: int = 1
    current_replicas: int = 0
    desired_replicas: int = 0
    targets: Mapping[str, str] = field(default_factory=dict)
    currents: Mapping[str, str] = field(default_factory=dict)
    """metric -> value per replica, as a quantity"""
    conditions: Mapping[str, tuple[str, str, str]] = field(default_factory=dict)
    tolerance_up: str = "0.1"
    tolerance_down: str = "0.1"
    """How far off its target a metric may be before anything moves, as quantities; these are Kubernetes' defaults."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything known of one InferenceService's children at one moment."""

    children: Mapping[tuple[str, str], Child] = field(default_factory=dict)
    """(kind, name) -> child"""
    deployment: DeploymentState | None = None
    autoscaler: AutoscalerState | None = None
    pods: tuple[PodState, ...] = ()
    ready_endpoints: int = 0

    def with_child(self, body: Object) -> "Observed":
        """The same with one child as the API server has just returned it."""
        child = observe_child(body)
        changed = replace(self, children={**self.children, (child.kind, child.name): child})
        if child.kind == "Deployment":
            return replace(changed, deployment=observe_deployment(body))
        if child.kind == "HorizontalPodAutoscaler":
            return replace(changed, autoscaler=observe_autoscaler(body))
        return changed

    def without_child(self, kind: str, name: str) -> "Observed":
        """The same after that child was deleted."""
        left = {key: child for key, child in self.children.items() if key != (kind, name)}
        gone = {"autoscaler": None} if kind == "HorizontalPodAutoscaler" else {}
        return replace(self, children=left, **gone)  # type: ignore[arg-type]


def observe_child(body: Object) -> Child:
    """The part that all children have in common. `body` needs its `kind`."""
    metadata = body["metadata"]
    controller: Object = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), {})
    kind, found = str(body["kind"]), metadata.get("labels") or {}
    return Child(
        kind=kind,
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        fingerprint=fingerprint(body),
        labels={key: str(found[key]) for key in names.child_labels("") if key in found},
        controller=f"{controller['kind']}/{controller['name']}" if controller else "",
        controller_uid=str(controller.get("uid", "")),
        access_mode=body["spec"]["accessModes"][0] if kind == "PersistentVolumeClaim" else "",
    )


def fingerprint(body: Object) -> str:
    """Hash of what people and controllers write on purpose, so without status and what the server fills in.

    A Deployment's replicas are left out: the HPA's business, or compared by number.
    """
    metadata = body["metadata"]
    content = {key: value for key, value in body.items() if key not in ("apiVersion", "kind", "metadata", "status")}
    if body["kind"] == "Deployment":
        content["spec"] = {key: value for key, value in content["spec"].items() if key != "replicas"}
    annotations = metadata.get("annotations") or {}
    content["annotations"] = {
        key: value for key, value in annotations.items() if not key.startswith(_CONTROLLER_ANNOTATIONS)
    }
    content["labels"] = metadata.get("labels") or {}
    content["owners"] = metadata.get("ownerReferences") or []
    return hash_of(content)


def hash_of(value: Any) -> str:
    """Hash of a JSON value; equal values have equal hashes, whatever the order of their keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def observe_deployment(body: Object) -> DeploymentState:
    spec, status, metadata = body["spec"], body.get("status") or {}, body["metadata"]
    annotations, template = metadata.get("annotations") or {}, spec["template"]["metadata"]
    return DeploymentState(
        generation=int(metadata.get("generation", 0)),
        observed_generation=int(status.get("observedGeneration", 0)),
        asked_replicas=int(spec.get("replicas", _DEFAULT_REPLICAS)),
        replicas_managers=_replicas_managers(metadata),
        template_hash=str(annotations.get(TEMPLATE_HASH_ANNOTATION, "")),
        engine_image=str(spec["template"]["spec"]["containers"][0].get("image", "")),
        config_hash=str((template.get("annotations") or {}).get(names.CONFIG_HASH_ANNOTATION, "")),
        held_replicas=str(annotations.get(HELD_REPLICAS_ANNOTATION, "")),
        revision=_whole(annotations.get(REVISION_ANNOTATION)),
        replicas=int(status.get("replicas", 0)),
        updated_replicas=int(status.get("updatedReplicas", 0)),
        ready_replicas=int(status.get("readyReplicas", 0)),
        available_replicas=int(status.get("availableReplicas", 0)),
        conditions=_conditions(status),
    )


def observe_autoscaler(body: Object) -> AutoscalerState:
    spec, status = body["spec"], body.get("status") or {}
    targets = {
        m["object"]["metric"]["name"]: str(m["object"]["target"].get("averageValue", ""))
        for m in spec.get("metrics") or ()
        if m.get("type") == "Object"
    }
    currents = {
        m["object"]["metric"]["name"]: str(m["object"]["current"].get("averageValue", ""))
        for m in status.get("currentMetrics") or ()
        if m.get("type") == "Object"
    }
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
    )


def observe_ready_endpoints(body: Object) -> int:
    """How many endpoints of an EndpointSlice are ready. An unset `ready` counts, as its API says."""
    endpoints = body.get("endpoints") or ()
    return sum(1 for e in endpoints if (e.get("conditions") or {}).get("ready") is not False)


def _tolerance(spec: Object, direction: str) -> str:
    rules = (spec.get("behavior") or {}).get(direction) or {}
    return str(rules.get("tolerance", "0.1"))


def _whole(text: object) -> int:
    """An annotation that should be a number; people can write anything into it."""
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
