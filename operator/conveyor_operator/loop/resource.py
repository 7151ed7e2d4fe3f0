"""What the loop asks of one kind of resource: a room of its own answers it, and `process` registers it.

`reconcile` drives a `Case`; `watches`, `handlers` and `store` need the kinds, the label and the projection. Neither
knows what the resource is.
"""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Protocol

from conveyor_operator.kinds import Key, Kind
from conveyor_operator.loop.child import Child, ChildId
from conveyor_operator.loop.events import Event
from conveyor_operator.loop.owner import Object
from conveyor_operator.loop.steps import Memory, Step
from conveyor_operator.loop.store import Store


class Case(Protocol):
    """One resource in one reconcile: what is desired, and what is there by now."""

    @property
    def stale(self) -> set[ChildId]:
        """Children to look up before the next plan: no watch has told of them, or not yet of their last change."""
        ...

    @property
    def children(self) -> Mapping[ChildId, Child]: ...

    def plan(self, now: datetime) -> Sequence[Step]:
        """The next steps, pure; asked again after they were executed, until there are none but a `RequeueAt`."""
        ...

    def see(self, child: Object) -> None:
        """A call of ours has brought this child."""
        ...

    def lose(self, id: ChildId) -> None:
        """A call of ours has deleted this child."""
        ...

    def build_status(self, now: datetime) -> Object: ...


class Resource(Protocol):
    """One kind of resource."""

    kind: Kind
    label: str
    """The label of everything that belongs to a resource of this kind. Its value is the resource's name."""
    children: Sequence[Kind]
    """What is applied for it; watched."""
    optional: Sequence[Kind]
    """Kinds of children that not every cluster serves."""
    grandchildren: Sequence[Kind]
    """What controllers make of the children; watched for the status."""

    def project(self, kind: Kind, key: Key, body: Mapping[str, Any]) -> Any:
        """What the store keeps of the resource `key` itself, of a child or of a grandchild. What it raises makes the
        object unreadable."""
        ...

    def new_memory(self, uid: str) -> Memory: ...

    def begin(self, body: Object, store: Store, memory: Any) -> Case:
        """`memory` is one of `new_memory`. Raises InvalidResource."""
        ...

    def build_invalid_status(self, body: Object, message: str, now: datetime) -> Object: ...

    def find_events(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> Sequence[Event]:
        """What to tell, from one status to the next."""
        ...

    def restored(self, child: ChildId, deleted: bool) -> Event:
        """The Event after a hand edit of a child was undone."""
        ...


def watched_kinds(resources: Sequence[Resource]) -> list[Kind]:
    """Each once: the resources, what is applied for them, and what controllers make of that. Without optional ones."""
    kinds = [kind for each in resources for kind in (each.kind, *each.children, *each.grandchildren)]
    optional = {kind for each in resources for kind in each.optional}
    return [kind for kind in dict.fromkeys(kinds) if kind not in optional]
