"""What the operator remembers of the ReplicaSets of an engine's Deployment. Pure: dictionaries in, frozen values out.

`observed` finds the newest by its pod template, as the Deployment's controller does: a Deployment's own conditions may
quote a ReplicaSet of a former template (docs/adr/0057).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor_operator.loop.child import hash_of

Object = Mapping[str, Any]

TEMPLATE_LABEL = "pod-template-hash"
"""Kubernetes' own label of a ReplicaSet and its pods."""


@dataclass(frozen=True, slots=True)
class ReplicaSetState:
    """One ReplicaSet: the pods that are its own, and why it cannot make them."""

    template: str
    """Hash of its pod template, as `hash_pod_template` gives it."""
    pods_label: str = ""
    """What its pods have under `TEMPLATE_LABEL`."""
    refused: str = ""
    """Why a pod was not made; empty if none was refused."""


def observe_replica_set(body: Object) -> ReplicaSetState:
    conditions = (body.get("status") or {}).get("conditions") or ()
    refused = (c for c in conditions if (c["type"], c["status"]) == ("ReplicaFailure", "True"))
    return ReplicaSetState(
        template=hash_pod_template(body["spec"]["template"]),
        pods_label=str((body["metadata"].get("labels") or {}).get(TEMPLATE_LABEL, "")),
        refused=next((str(c.get("message", "")) for c in refused), ""),
    )


def hash_pod_template(template: Object) -> str:
    """Hash of a pod template without the label that only ReplicaSets add to it."""
    metadata = template["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != TEMPLATE_LABEL}
    return hash_of({**template, "metadata": {**metadata, "labels": labels}})
