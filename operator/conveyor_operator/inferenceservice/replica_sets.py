"""What the operator keeps of the ReplicaSets of an engine's Deployment. Pure: dictionaries in, frozen values out.

`observed` finds the newest one by its pod template, as the Deployment's controller does. The Deployment's own
conditions are not used, because they may quote a ReplicaSet of an earlier template (docs/adr/0057).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor_operator.loop.child import hash_of

Object = Mapping[str, Any]

TEMPLATE_LABEL = "pod-template-hash"
"""The label that Kubernetes sets on a ReplicaSet and its pods."""


@dataclass(frozen=True, slots=True)
class ReplicaSetState:
    """One ReplicaSet: how to find its pods, and why it cannot create them."""

    template: str
    """Hash of its pod template, from `hash_pod_template`."""
    pods_label: str = ""
    """The value of `TEMPLATE_LABEL` in its pods."""
    refused: str = ""
    """Why a pod was not created; "" if none was refused."""


def observe_replica_set(body: Object) -> ReplicaSetState:
    conditions = (body.get("status") or {}).get("conditions") or ()
    refused = (c for c in conditions if (c["type"], c["status"]) == ("ReplicaFailure", "True"))
    return ReplicaSetState(
        template=hash_pod_template(body["spec"]["template"]),
        pods_label=str((body["metadata"].get("labels") or {}).get(TEMPLATE_LABEL, "")),
        refused=next((str(c.get("message", "")) for c in refused), ""),
    )


def hash_pod_template(template: Object) -> str:
    """Return a hash of a pod template, without the label that ReplicaSets add to it."""
    metadata = template["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != TEMPLATE_LABEL}
    return hash_of({**template, "metadata": {**metadata, "labels": labels}})
