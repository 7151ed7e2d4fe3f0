"""One existing child of a resource, as a small frozen value: whose it is, and what it says, as a fingerprint. Pure.

Made by a resource when it projects what is watched, and by `reconcile` of what a call has returned.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Written by Kubernetes' own controllers, so no edit.
_CONTROLLER_ANNOTATIONS = ("deployment.kubernetes.io/revision", "pv.kubernetes.io/", "volume.kubernetes.io/")

ChildId = tuple[str, str]
"""(kind, name)"""


@dataclass(frozen=True, slots=True)
class Child:
    """One existing child."""

    kind: str
    name: str
    uid: str
    fingerprint: str
    """Hash of all that is neither status nor written by the API server; it changes with every edit."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its values of the labels that every child of its owner has."""
    controller: str = ""
    """`Kind/name` of the controlling owner, empty without one."""
    controller_uid: str = ""
    access_mode: str = ""
    """Claims: how they may be mounted; cannot change any more."""
    replicas: int | None = None
    """What a Deployment is asked for."""
    done: bool = False
    """A Job's: it has succeeded."""
    without_pods_since: str = ""
    """A Job's: when it was made, as long as it has had no pod."""


def observe_child(body: Mapping[str, Any], labels: Iterable[str] = ()) -> Child:
    """The part that all children have in common. `body` needs its `kind`; `labels` are those to keep."""
    metadata, spec = body["metadata"], body.get("spec") or {}
    controller: Mapping[str, Any] = next((o for o in metadata.get("ownerReferences") or () if o.get("controller")), {})
    kind, found, status = str(body["kind"]), metadata.get("labels") or {}, body.get("status") or {}
    had_pods = any(status.get(count) for count in ("active", "terminating", "succeeded", "failed"))
    return Child(
        kind=kind,
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        fingerprint=fingerprint(body),
        labels={key: str(found[key]) for key in labels if key in found},
        controller=f"{controller['kind']}/{controller['name']}" if controller else "",
        controller_uid=str(controller.get("uid", "")),
        access_mode=spec["accessModes"][0] if kind == "PersistentVolumeClaim" else "",
        replicas=int(spec.get("replicas", 1)) if kind == "Deployment" else None,
        done=kind == "Job" and status.get("succeeded", 0) > 0,
        without_pods_since=metadata.get("creationTimestamp", "") if kind == "Job" and not had_pods else "",
    )


def fingerprint(body: Mapping[str, Any]) -> str:
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
