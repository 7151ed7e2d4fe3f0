"""The protocol between the loop and one kind of resource. A package implements it, and `process` registers it.

`reconcile` runs a `Case`. `watches`, `handlers` and `store` use the kinds, the label and the projection. All of them
work for any kind of resource.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop.child import Child, ChildId
from conveyor_operator.loop.events import Event
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Memory, Step
from conveyor_operator.loop.store import Store


class Case(Protocol):
    """One resource in one reconcile: its desired and its observed state."""

    @property
    def stale(self) -> set[ChildId]:
        """Children, grandchildren and other objects of these kinds to read before the next plan.

        No watch has reported them or their latest change yet, or the watch keeps too little of them.
        """
        ...

    @property
    def children(self) -> Mapping[ChildId, Child]: ...

    def plan(self, now: datetime) -> Sequence[Step]:
        """Return the next steps, without I/O. Called again after they ran, until only `RequeueAt`s or none are left."""
        ...

    def see(self, child: Object) -> None:
        """Record an object that an API call of the operator has returned."""
        ...

    def lose(self, id: ChildId) -> None:
        """Record that an API call of the operator has deleted this child."""
        ...

    def build_status(self, now: datetime) -> Object: ...


class Resource(Protocol):
    """One kind of resource."""

    kind: ObjectKind
    label: str
    """The label of all objects of a resource. Its value is the resource's name, perhaps with a dot and a suffix."""
    children: Sequence[ObjectKind]
    """Kinds that the operator applies for the resource. They are watched."""
    optional: Sequence[ObjectKind]
    """Kinds of children that not every cluster serves."""
    grandchildren: Sequence[ObjectKind]
    """Kinds that controllers create from the children. They are watched for the status."""

    def project(self, kind: ObjectKind, key: Key, body: Mapping[str, Any]) -> Any:
        """Return the value that the store keeps for an object: the resource `key` itself, a child or a grandchild.

        If this raises, the object counts as unreadable.
        """
        ...

    def new_memory(self, uid: str) -> Memory: ...

    def begin(self, body: Object, store: Store, memory: Any) -> Case:
        """Begin a reconcile. `memory` comes from `new_memory`. Raises InvalidResource."""
        ...

    def build_invalid_status(self, body: Object, message: str, now: datetime) -> Object: ...

    def expose(self, body: Object, status: Object) -> None:
        """Update the metrics about the resource. Called with the status of each reconcile, even if it is unchanged.

        The resource still exists. A follower of the store removes what it exposes when it is deleted.
        """
        ...

    def find_events(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Event]:
        """Return the Events for the change from one status to the next."""
        ...

    def restored(self, child: ChildId, deleted: bool) -> Event:
        """Return the Event for an edit of a child that was undone. `deleted`: the child had been deleted."""
        ...


def watched_kinds(resources: Sequence[Resource]) -> list[ObjectKind]:
    """Return the kinds of the resources, their children and their grandchildren, each once, without optional kinds."""
    kinds = [kind for each in resources for kind in (each.kind, *each.children, *each.grandchildren)]
    optional = {kind for each in resources for kind in each.optional}
    return [kind for kind in dict.fromkeys(kinds) if kind not in optional]
