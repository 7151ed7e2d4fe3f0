"""Watches single objects by name. Used by `keeper`.

The watches use a field selector, so that a role with `resourceNames` is enough.
"""

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, TypeVar

from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, WatchState, watch_collection
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.kinds import Key

K = TypeVar("K")


async def follow(cluster: Cluster, key: Key, on_change: Callable[[Object | None], None]) -> None:
    """Call `on_change` with the object now and after every change, until cancelled; with None if it does not exist."""
    kind, namespace, name = key
    selector = f"metadata.name={name}"
    collection = Collection(
        kind.group, kind.version, kind.plural, namespace, field_selector=selector, shape=dict[str, Any]
    )
    await watch_collection(cluster.client, collection, _One(name, on_change), WatchState(f"{kind.plural}/{name}"))


async def remember(known: MutableMapping[K, Object | None], key: K, write: Awaitable[Object | None]) -> None:
    """Store the result of a write in `known`, unless a watch has reported the object meanwhile.

    The watch's report is at least as new as the write, or a newer report follows. But the result of the write may be
    older than the report, and then no further report would correct it.
    """
    before = known.get(key)
    after = await write
    if known.get(key) is before:
        known[key] = after


class _One:
    """A watch's sink for a collection with at most one object."""

    def __init__(self, name: str, on_change: Callable[[Object | None], None]) -> None:
        self._name = name
        self._on_change = on_change

    def put(self, body: Json) -> str:
        self._on_change(body)
        return self._name

    def delete(self, body: Json) -> None:
        self._on_change(None)

    def keep_only(self, keys: set[str], namespace: str) -> Iterable[None]:
        if not keys:
            self._on_change(None)
        return ()
