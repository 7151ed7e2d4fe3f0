"""The owner of children, and the metadata that all of them need: labels and an owner reference. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conveyor_operator.kinds import ObjectKind

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """One resource. `labels`: the labels that all its children get."""

    kind: ObjectKind
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]


def build_metadata(owner: Owner, name: str) -> Object:
    """Build the metadata of a child. Its owner reference lets the garbage collector delete it with its owner."""
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": dict(owner.labels),
        "ownerReferences": [
            {
                "apiVersion": owner.kind.api_version,
                "kind": owner.kind.kind,
                "name": owner.name,
                "uid": owner.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ],
    }
