"""Stores the newest known state of the cluster's objects, by key. Calls the followers of a kind after each change.

`watches` puts in the projection of each object that the API server sends. The reconcile of a resource reads the
projections of this resource's objects. Objects are stored by uid, because for a moment there may be two objects with
the same name. Then the one that arrived later counts.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop.bodies import Bodies


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """The last value of one object, and its key. A child has the key of the resource that owns it."""

    key: Key
    value: Any


class Store:
    """All objects in the order of arrival, with two indexes: by kind and uid, and by kind and key."""

    def __init__(self) -> None:
        self._objects: defaultdict[ObjectKind, dict[str, Entry]] = defaultdict(dict)
        self._by_key: defaultdict[ObjectKind, dict[Key, dict[str, Entry]]] = defaultdict(dict)
        self._followers: defaultdict[ObjectKind, list[Callable[[Key, Any], None]]] = defaultdict(list)
        self.bodies = Bodies()
        """The bodies of the resources themselves."""

    def follow(self, kind: ObjectKind, notify: Callable[[Key, Any], None]) -> None:
        """Call `notify(key, value)` after each change of an object of this kind. value: None if no object is left."""
        self._followers[kind].append(notify)

    def has(self, kind: ObjectKind, uid: str, key: Key, value: Any) -> bool:
        """Return whether the object is stored with this key and an equal value."""
        entry = self._objects[kind].get(uid)
        return entry is not None and (entry.key, entry.value) == (key, value)

    def put(self, kind: ObjectKind, uid: str, key: Key, value: Any) -> Key | None:
        """Store the value of an object and replace its previous one. Returns the previous key if that differs."""
        former = self._objects[kind].get(uid)
        left = former.key if former is not None and former.key != key else None
        if left is not None:
            self.drop(kind, uid)
        entry = Entry(key, value)
        self._objects[kind][uid] = entry
        self._by_key[kind].setdefault(key, {})[uid] = entry
        self._notify(kind, key)
        return left

    def drop(self, kind: ObjectKind, uid: str) -> Key | None:
        """Remove an object that no longer exists. Returns its key if it was known."""
        entry = self._objects[kind].pop(uid, None)
        if entry is None:
            return None
        of_key = self._by_key[kind][entry.key]
        del of_key[uid]
        if not of_key:
            del self._by_key[kind][entry.key]
        self.bodies.drop(uid)
        self._notify(kind, entry.key)
        return entry.key

    def keys(self, kind: ObjectKind, namespace: str | None) -> dict[str, Key]:
        """Return the keys of all objects of a kind by uid, in one namespace or in all."""
        return {
            uid: entry.key for uid, entry in self._objects[kind].items() if namespace in (None, entry.key.namespace)
        }

    def resources(self, kind: ObjectKind) -> list[Key]:
        """Return the keys of all resources of this kind."""
        return list(self._by_key[kind])

    def uid(self, key: Key) -> str | None:
        """Return the resource's uid; None if it does not exist."""
        return next(reversed(self._by_key[key.kind].get(key, {})), None)

    def values(self, kind: ObjectKind, key: Key) -> list[Any]:
        """Return the values of all objects of a kind that belong to this resource."""
        return [entry.value for entry in self._by_key[kind].get(key, {}).values()]

    def _notify(self, kind: ObjectKind, key: Key) -> None:
        if followers := self._followers.get(kind):
            value = next(reversed(self.values(kind, key)), None)
            for follower in followers:
                follower(key, value)
