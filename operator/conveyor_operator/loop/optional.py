"""Watches kinds of children that only some clusters have, as long as the cluster serves them.

Run by `process`. Kopf would have to scan for these kinds, or know them before it starts. So they have a separate watch,
which passes its objects to `watches` as Kopf's watches do. An idle operator sends no requests: it looks for a missing
kind again only after a resource needs the kind, and checks whether a kind was removed only when its watch fails.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, WatchState, watch_collection
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import ApiError
from conveyor_operator.kinds import ObjectKind
from conveyor_operator.loop.resource import Resource
from conveyor_operator.loop.watches import Watches

_LOOK_SECONDS = 20.0


class OptionalKinds:
    """`on_change` is called when the cluster begins or stops to serve a kind."""

    def __init__(
        self,
        cluster: Cluster,
        resources: Sequence[Resource],
        watches: Watches,
        namespaces: Sequence[str],
        on_change: Callable[[], None],
    ) -> None:
        self._cluster = cluster
        self._labels = {kind: resource.label for resource in resources for kind in resource.optional}
        self._watches = watches
        self._namespaces = namespaces or ("",)
        self._on_change = on_change
        self._served: dict[ObjectKind, bool] = {}
        self._wanted = {kind: asyncio.Event() for kind in self._labels}

    def serves(self, kind: ObjectKind) -> bool | None:
        """Return whether the cluster serves the kind; None if that is not known yet.

        Call it only for a resource that needs the kind: after the first call, the operator polls for a missing kind.
        """
        self._wanted[kind].set()
        return self._served.get(kind)

    async def run(self) -> None:
        """Follow all optional kinds until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for kind in self._labels:
                tasks.create_task(self._follow(kind), name=f"follow {kind.kind}")

    async def _follow(self, kind: ObjectKind) -> None:
        while True:
            await self._wait_until(kind, True, self._wanted[kind].wait)
            self._report(kind, True)
            failed = _Failures()
            async with asyncio.TaskGroup() as tasks:
                watching = [tasks.create_task(self._watch(kind, each, failed.note)) for each in self._namespaces]
                await self._wait_until(kind, False, failed.wait)
                for watch in watching:
                    watch.cancel()
            # Before `on_change`, because a reconcile would try to delete the stored objects.
            self._watches.keep_only(kind, None, set())
            self._report(kind, False)

    async def _wait_until(
        self, kind: ObjectKind, served: bool, until_in_doubt: Callable[[], Awaitable[object]]
    ) -> None:
        while (found := await self._look(kind)) is not served:
            if found is not None and kind not in self._served:
                self._report(kind, found)
            await asyncio.sleep(_LOOK_SECONDS)
            if found is not None:
                await until_in_doubt()

    async def _look(self, kind: ObjectKind) -> bool | None:
        try:
            return await self._cluster.is_served(kind)
        except ApiError:
            return None

    def _report(self, kind: ObjectKind, served: bool) -> None:
        self._served[kind] = served
        self._on_change()

    async def _watch(self, kind: ObjectKind, namespace: str, on_failure: Callable[[], None]) -> None:
        collection = Collection(
            kind.group, kind.version, kind.plural, namespace, label_selector=self._labels[kind], shape=dict[str, Any]
        )
        sink = _Sink(self._watches, kind)
        await watch_collection(self._cluster.client, collection, sink, WatchState(collection.name), on_failure)


class _Failures:
    """Lets one task wait for the next failure of several watches."""

    def __init__(self) -> None:
        self._noted = asyncio.Event()

    def note(self) -> None:
        self._noted.set()

    async def wait(self) -> None:
        await self._noted.wait()
        self._noted.clear()


class _Sink:
    """A watch's sink that passes the objects of one kind to `watches`."""

    def __init__(self, watches: Watches, kind: ObjectKind) -> None:
        self._watches = watches
        self._kind = kind

    def put(self, body: Json) -> str:
        self._watches.take(self._kind, "MODIFIED", body)
        return str(body["metadata"]["uid"])

    def delete(self, body: Json) -> None:
        self._watches.take(self._kind, "DELETED", body)

    def keep_only(self, keys: set[str], namespace: str) -> Iterable[None]:
        self._watches.keep_only(self._kind, namespace or None, keys)
        return ()
