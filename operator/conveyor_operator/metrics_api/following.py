"""One object of the cluster by its name, now and after every change. Used by `keeper`.

By field selector, so that a role with `resourceNames` is enough.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, WatchState, watch_collection
from conveyor_operator.cluster import Cluster, Object
from conveyor_operator.kinds import Key

K = TypeVar("K")


async def follow(cluster: Cluster, key: Key, tell: Callable[[Object | None], None]) -> None:
    """For ever: tells the object, or None when it is not there."""
    kind, namespace, name = key
    selector = f"metadata.name={name}"
    collection = Collection(
        kind.group, kind.version, kind.plural, namespace, field_selector=selector, shape=dict[str, Any]
    )
    await watch_collection(cluster.client, collection, _One(name, tell), WatchState(f"{kind.plural}/{name}"))


async def remember(known: MutableMapping[K, Object | None], key: K, write: Awaitable[Object | None]) -> None:
    """Puts what a write answers into `known`, unless a watch has told of the object in the meantime.

    Its word is as new, or a newer one follows; the answer may be older, and nothing would follow.
    """
    before = known.get(key)
    after = await write
    if known.get(key) is before:
        known[key] = after


class _One:
    """A collection of at most one object."""

    def __init__(self, name: str, tell: Callable[[Object | None], None]) -> None:
        self._name = name
        self._tell = tell

    def put(self, body: Json) -> str:
        self._tell(body)
        return self._name

    def delete(self, body: Json) -> None:
        self._tell(None)

    def keep_only(self, keys: set[str], namespace: str) -> None:
        if not keys:
            self._tell(None)
