"""What all children share: labels, and the owner reference by which they are garbage-collected. Pure."""

from dataclasses import dataclass
from typing import Any

from conveyor_api import names

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """The InferenceService that the children belong to."""

    namespace: str
    name: str
    uid: str


def build_metadata(owner: Owner, name: str) -> Object:
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": names.child_labels(owner.name),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
