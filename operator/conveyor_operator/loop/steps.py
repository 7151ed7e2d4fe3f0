"""The steps of a plan, and the memory of executed steps. Plain data.

A resource's plan returns the steps, without I/O. `reconcile` executes them, and also keeps the memory.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from conveyor_api.conditions import Reason
from conveyor_operator.loop.child import ChildId


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply one child; `reason` is for the log: created, checked (first look of this process), changed
    (by the spec) or drifted (by somebody else)."""

    body: dict[str, Any]
    reason: str

    @property
    def id(self) -> ChildId:
        return str(self.body["kind"]), str(self.body["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class Hold:
    """Apply a child's number of replicas as the field manager `conveyor-replicas`, so that the number stays when
    `conveyor` gives up the field."""

    id: ChildId
    count: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly this object, not a later one of the same name."""

    id: ChildId
    uid: str


@dataclass(frozen=True, slots=True)
class RequeueAt:
    """Reconcile again at this time, unless an event causes it earlier."""

    at: datetime


Step = Apply | Hold | Delete | RequeueAt


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A child that cannot be applied. `temporary`: waiting is enough."""

    kind: str
    name: str
    reason: Reason
    message: str
    temporary: bool = False


@dataclass(frozen=True, slots=True)
class Applied:
    """Hashes of the last applied body, and of what the API server stored."""

    sent: str
    fingerprint: str


@dataclass(slots=True)
class Memory:
    """The memory of one resource, as long as it has this uid. It only saves API calls."""

    uid: str
    applied: dict[ChildId, Applied] = field(default_factory=dict)
    told_restored: dict[ChildId, float] = field(default_factory=dict)
    """When (monotonic) an Event last reported that a child was restored."""
    former_hash: str = ""
    """`hash_applied` of what a former operator applied, until the first plan."""
    failing: bool = False
    """The reconcile before ended with an ApiError."""
    waiting_since: datetime | None = None
    """When a plan first returned a `RequeueAt`, if all later plans did so too."""

    # Only of the present reconcile
    done: list[Step] = field(default_factory=list)
    refused: dict[ChildId, Obstacle] = field(default_factory=dict)
    """Calls that failed."""
    restored: dict[ChildId, bool] = field(default_factory=dict)
    """Children that were edited by hand; True: deleted."""

    def begin(self) -> None:
        """Starts another reconcile."""
        self.done, self.refused, self.restored = [], {}, {}
