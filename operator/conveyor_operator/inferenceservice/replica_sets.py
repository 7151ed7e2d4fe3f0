"""What the operator keeps of the ReplicaSets of an engine's Deployment. Pure: dictionaries in, frozen values out.

`observed` finds the newest one by its pod template, as the Deployment's controller does. The Deployment's own
conditions are not used, because they may quote a ReplicaSet of an earlier template (docs/adr/0057).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor_api import names
from conveyor_operator.loop.child import hash_of

Object = Mapping[str, Any]

TEMPLATE_HASH_ANNOTATION = f"{names.GROUP}/template-hash"
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
    refused_since: str = ""
    name: str = ""
    template_hash: str = ""
    """The Deployment's annotation TEMPLATE_HASH_ANNOTATION when this ReplicaSet was its newest one."""


def observe_replica_set(body: Object) -> ReplicaSetState:
    conditions = (body.get("status") or {}).get("conditions") or ()
    refused: Object = next((c for c in conditions if (c["type"], c["status"]) == ("ReplicaFailure", "True")), {})
    metadata = body["metadata"]
    return ReplicaSetState(
        template=hash_pod_template(body["spec"]["template"]),
        pods_label=str((metadata.get("labels") or {}).get(TEMPLATE_LABEL, "")),
        refused=str(refused.get("message", "")),
        refused_since=str(refused.get("lastTransitionTime") or ""),
        name=str(metadata["name"]),
        template_hash=str((metadata.get("annotations") or {}).get(TEMPLATE_HASH_ANNOTATION, "")),
    )


def hash_pod_template(template: Object) -> str:
    """Return a hash of a pod template, without the label that ReplicaSets add to it."""
    return hash_of(without_label(template))


def without_label(template: Object) -> dict[str, Any]:
    """Return a ReplicaSet's pod template as the Deployment had it."""
    metadata = template["metadata"]
    labels = {key: value for key, value in (metadata.get("labels") or {}).items() if key != TEMPLATE_LABEL}
    return {**template, "metadata": {**metadata, "labels": labels}}
