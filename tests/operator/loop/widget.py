"""The smallest possible second resource: a Widget wants its text in a ConfigMap from a given time on.

A room in one file: what `loop.resource` asks for, and nothing else. Registered by `test_second_resource.py`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from conveyor_api import names
from conveyor_api.errors import InvalidResource, Problem
from conveyor_operator.kinds import CONFIG_MAP, Key, ObjectKind
from conveyor_operator.loop.child import Child, ChildId, observe_child
from conveyor_operator.loop.differences import find_applies, find_obstacles
from conveyor_operator.loop.events import Event
from conveyor_operator.loop.owner import Object, Owner, build_metadata
from conveyor_operator.loop.steps import Memory, RequeueAt, Step
from conveyor_operator.loop.store import Store

GROUP = "tests.conveyor.dev"
WIDGET = ObjectKind(GROUP, "v1", "Widget", "widgets")
LABEL = f"{GROUP}/widget"

_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_SCHEMA = {"type": "object", "properties": {"spec": _ANYTHING, "status": _ANYTHING}}
CRD: Object = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": f"widgets.{GROUP}"},
    "spec": {
        "group": GROUP,
        "scope": "Namespaced",
        "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": _SCHEMA},
                "subresources": {"status": {}},
            }
        ],
    },
}


def plan(desired: list[Object], case: "WidgetCase", now: datetime) -> list[Step]:
    """Return the missing children; none before the time. Pure, as every plan."""
    if case.at is not None and now < case.at:
        return [RequeueAt(case.at)]
    return list(find_applies(case.owner, desired, case.children, case.memory))


@dataclass
class WidgetCase:
    owner: Owner
    text: str
    at: datetime | None
    memory: Memory
    children: dict[ChildId, Child]
    stale: set[ChildId] = field(default_factory=set)

    @property
    def desired(self) -> list[Object]:
        metadata = build_metadata(self.owner, f"{self.owner.name}-text")
        return [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"text": self.text}}]

    def plan(self, now: datetime) -> list[Step]:
        return plan(self.desired, self, now)

    def see(self, child: Object) -> None:
        observed = observe_child(child, self.owner.labels)
        self.children[observed.kind, observed.name] = observed

    def lose(self, id: ChildId) -> None:
        self.children.pop(id, None)

    def build_status(self, now: datetime) -> Object:
        obstacles = find_obstacles(self.owner, self.desired, self.children)
        return {"says": self.text if self.children else "", "obstacle": obstacles[0].message if obstacles else ""}


class Widgets:
    kind = WIDGET
    label = LABEL
    children: Sequence[ObjectKind] = (CONFIG_MAP,)
    optional: Sequence[ObjectKind] = ()
    grandchildren: Sequence[ObjectKind] = ()

    def project(self, kind: ObjectKind, key: Key, body: Mapping[str, Any]) -> Child | None:
        if kind == WIDGET:
            return None
        return observe_child(body, (names.MANAGED_BY_LABEL, LABEL))

    def new_memory(self, uid: str) -> Memory:
        return Memory(uid)

    def begin(self, body: Object, store: Store, memory: Memory) -> WidgetCase:
        metadata, spec = body["metadata"], body["spec"]
        if not isinstance(spec.get("text"), str):
            raise InvalidResource((Problem("spec.text", "must be a string"),))
        labels = {names.MANAGED_BY_LABEL: "conveyor", LABEL: metadata["name"]}
        owner = Owner(WIDGET, metadata["namespace"], metadata["name"], metadata["uid"], labels)
        at = datetime.fromisoformat(spec["at"]) if "at" in spec else None
        known = store.values(CONFIG_MAP, Key(WIDGET, owner.namespace, owner.name))
        return WidgetCase(owner, spec["text"], at, memory, {(child.kind, child.name): child for child in known})

    def build_invalid_status(self, body: Object, message: str, now: datetime) -> Object:
        return {"says": message}

    def expose(self, body: Object, status: Object) -> None:
        pass

    def find_events(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Event]:
        return [Event("Says", str(after["says"]))] if after["says"] else []

    def restored(self, child: ChildId, deleted: bool) -> Event:
        return Event("Restored", f"{' '.join(child)} is restored")
