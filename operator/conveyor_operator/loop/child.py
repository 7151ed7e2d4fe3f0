"""An existing child of a resource, as a small frozen value with its owner and a fingerprint of its content. Pure.

The method `project` of a resource builds it from watched objects, and `reconcile` from the responses to its calls.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Kubernetes' own controllers write these, so they do not count as edits.
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
    """See the function `fingerprint`. Every edit that Conveyor must revert changes it, except an edit of `replicas`."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """The child's labels, limited to the keys that Conveyor sets on every child. Other labels are left out."""
    controller: str = ""
    """`Kind/name` of the controlling owner, empty without one."""
    controller_group: str = ""
    """API group of the controlling owner. Another group may have a kind of the same name."""
    controller_uid: str = ""
    access_mode: str = ""
    """For a PersistentVolumeClaim: its immutable access mode."""
    replicas: int | None = None
    """For a Deployment: `spec.replicas`."""
    done: bool = False
    """For a Job: whether it has succeeded."""
    without_pods_since: str = ""
    """For a Job that has not had a pod yet: its creation time; otherwise empty."""


def id_of(body: Mapping[str, Any]) -> ChildId:
    return str(body["kind"]), str(body["metadata"]["name"])


def observe_child(body: Mapping[str, Any], labels: Iterable[str] = ()) -> Child:
    """Build the value for a child's `body`, which must have a `kind`. `labels`: the labels to keep."""
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
        controller_group=str(controller.get("apiVersion", "")).rpartition("/")[0],
        controller_uid=str(controller.get("uid", "")),
        access_mode=spec["accessModes"][0] if kind == "PersistentVolumeClaim" else "",
        replicas=int(spec.get("replicas", 1)) if kind == "Deployment" else None,
        done=kind == "Job" and status.get("succeeded", 0) > 0,
        without_pods_since=metadata.get("creationTimestamp", "") if kind == "Job" and not had_pods else "",
    )


def fingerprint(body: Mapping[str, Any]) -> str:
    """Return a hash of the spec or data, the labels, the annotations and the owner references.

    Annotations of Kubernetes' own controllers are left out. A Deployment's `spec.replicas` is left out too: with
    autoscaling the HPA sets it, and without autoscaling `Child.replicas` is compared.
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
    """Return a hash of a JSON value. The order of keys does not matter."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
