"""The owner of children, and the metadata that all of them need: labels and an owner reference. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conveyor_operator.kinds import ObjectKind

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Owner:
    """One resource.

    `labels`: the labels by which its children are found. `more_labels`, `annotations`: what users add to all children.
    """

    kind: ObjectKind
    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str]
    more_labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def build_metadata(owner: Owner, name: str) -> Object:
    """Build the metadata of a child. Its owner reference lets the garbage collector delete it with its owner."""
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": {**owner.more_labels, **owner.labels},
        **({"annotations": dict(owner.annotations)} if owner.annotations else {}),
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
