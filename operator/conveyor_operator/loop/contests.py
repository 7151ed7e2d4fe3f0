"""A child that somebody else changes again after each restore, so the operator restores it less and less often. Pure.

Without pauses, operator and opponent would write as fast as they can, and each write to a pod template is a rollout.
`steps.Memory` keeps the contests, `reconcile` counts the restores, and `differences` leaves out children that pause.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from conveyor_api import names
from conveyor_operator.loop.child import ChildId

_RESTORES_WITHOUT_PAUSE = 4
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(seconds=2), timedelta(minutes=5)
_SHORTEST_PEACE = timedelta(minutes=1)
"""The contest ends if nobody edits the child for this time, or for twice the pause if that is longer."""


@dataclass(frozen=True, slots=True)
class Contest:
    """Restores of one child, each soon after the one before.

    `last`: when the last one was. `cause`: who changes which fields, in words.
    """

    restores: int
    last: datetime
    cause: str = ""

    @property
    def pauses_next(self) -> bool:
        """Whether a pause follows the next restore."""
        return self.restores >= _RESTORES_WITHOUT_PAUSE

    @property
    def is_open(self) -> bool:
        """Whether the operator pauses between restores."""
        return self.restores > _RESTORES_WITHOUT_PAUSE

    @property
    def resumes_at(self) -> datetime:
        """When the operator may restore the child again."""
        return self.last + self._pause

    @property
    def ends_at(self) -> datetime:
        """When the contest is over, if there is no further restore."""
        return self.last + max(_SHORTEST_PEACE, 2 * self._pause)

    @property
    def _pause(self) -> timedelta:
        doublings = min(self.restores - _RESTORES_WITHOUT_PAUSE - 1, 16)
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2**doublings) if doublings >= 0 else timedelta()


def explain(id: ChildId, before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    """Return who keeps changing which fields of a child. before: the child with the edit; None if it was deleted.

    The other writer may not have edited the child again yet. Then the fields are not known.
    """
    changed = sorted(_find_changes(_content(before), _content(after))) if before is not None else []
    who = _find_manager(before, changed) if before is not None else ""
    fields = ", ".join(".".join(path) for path in changed[:3]) + (", ..." if len(changed) > 3 else "")
    does = "deleting" if before is None else f"changing {fields} of" if changed else "changing"
    return (
        f"{who or 'somebody'} keeps {does} {' '.join(id)}, so Conveyor restores it only every few minutes. Change the "
        "InferenceService instead, or stop the other writer"
    )


def _content(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an edit may change: no status, and no fields that only the API server writes."""
    metadata = {key: body["metadata"].get(key) for key in ("labels", "annotations", "ownerReferences")}
    return {**body, "metadata": metadata, "status": None}


def _find_changes(before: Any, after: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of fields that differ. Lists are compared as a whole."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() | after.keys():
            yield from _find_changes(before.get(key), after.get(key), (*path, key))
    elif before != after:
        yield path


def _find_manager(before: Mapping[str, Any], changed: list[tuple[str, ...]]) -> str:
    """Return the last other field manager that owns one of these fields; "" without one, as after a removal."""
    ours = (names.FIELD_MANAGER, names.REPLICAS_FIELD_MANAGER)
    found = [
        (str(entry.get("time", "")), str(entry["manager"]))
        for entry in before["metadata"].get("managedFields") or ()
        if entry.get("manager") not in (None, *ours)
        and any(_owns(entry.get("fieldsV1") or {}, path) for path in changed)
    ]
    return max(found, default=("", ""))[1]


def _owns(fields: Mapping[str, Any], path: tuple[str, ...]) -> bool:
    for key in path:
        if f"f:{key}" not in fields:
            return False
        fields = fields[f"f:{key}"]
    return True
