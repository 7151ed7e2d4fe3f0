"""The steps of a plan, and the memory of executed steps. Plain data.

A resource's plan returns the steps, without I/O. `reconcile` executes them, and also keeps the memory.
"""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from conveyor_api.conditions import Reason
from conveyor_operator.loop.child import ChildId, id_of
from conveyor_operator.loop.contests import Contest


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply of one child.

    `reason` is for the log: created, checked (this process's first apply), changed (with the spec) or drifted (after an
    edit by somebody else).
    """

    body: dict[str, Any]
    reason: str

    @property
    def id(self) -> ChildId:
        return id_of(self.body)


@dataclass(frozen=True, slots=True)
class Hold:
    """Apply a child's number of replicas as the field manager `conveyor-replicas`.

    So the number stays when the field manager `conveyor` gives up the field.
    """

    id: ChildId
    count: int
    force: bool = False


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete the object with this uid, but not a later one with the same name."""

    id: ChildId
    uid: str


@dataclass(frozen=True, slots=True)
class RequeueAt:
    """Reconcile again at this time, unless an event causes it earlier."""

    at: datetime


Step = Apply | Hold | Delete | RequeueAt


@dataclass(frozen=True, slots=True)
class Obstacle:
    """A child that cannot be applied. `temporary`: nobody needs to do anything, the operator retries."""

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
    """What the operator remembers about the resource with this uid. This memory only saves API calls."""

    uid: str
    applied: dict[ChildId, Applied] = field(default_factory=dict)
    restored_reported: dict[ChildId, float] = field(default_factory=dict)
    """When an Event last reported that a child was restored, in monotonic seconds."""
    former_hash: str = ""
    """The result of `hash_applied` for what the previous operator process applied. Cleared at the first plan."""
    contests: dict[ChildId, Contest] = field(default_factory=dict)
    """Children that were restored lately, and how often."""
    failing: bool = False
    """Whether the previous reconcile ended with an ApiError."""
    waiting_since: datetime | None = None
    """Since when every reconcile has ended with a `RequeueAt`; None if the last one ended without."""

    # Only for the current reconcile
    done: list[Step] = field(default_factory=list)
    refused: dict[ChildId, Obstacle] = field(default_factory=dict)
    """Obstacles from failed calls."""
    restored: dict[ChildId, bool] = field(default_factory=dict)
    """Children whose edits were undone; True if they had been deleted."""
    paused: frozenset[ChildId] = frozenset()
    """Contested children that must not be restored yet."""

    def begin(self, now: datetime) -> None:
        """Clear what belongs to a single reconcile, before the next one."""
        self.done, self.refused, self.restored = [], {}, {}
        self.contests = {id: contest for id, contest in self.contests.items() if now < contest.ends_at}
        self.paused = frozenset(id for id, contest in self.contests.items() if now < contest.resumes_at)

    @property
    def open_contests(self) -> dict[ChildId, Contest]:
        """The contested children, which the operator restores after a pause only."""
        return {id: contest for id, contest in self.contests.items() if contest.is_open}
