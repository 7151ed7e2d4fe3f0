"""Where the gateway's objects come from: a `Source` keeps the catalog equal to them. Used by `server`.

`ClusterSource` watches a cluster. `conveyor run` has a source without a cluster (`conveyor_local`).
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import Protocol

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.engines.tokens import EngineTokens
from conveyor_gateway.settings import Settings
from conveyor_gateway.watching.catalog import Catalog
from conveyor_gateway.watching.issuer import SHORTEST_SECONDS
from conveyor_kube.gateways import gateway_slices, parse_gateways
from conveyor_kube.issuer import follow_issuer
from conveyor_kube.resources import claim_collection, key_collection, service_collection, slice_collection
from conveyor_kube.tokens import request_token
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json
from conveyor_kube.watch import Collection, Sink, WatchState, connect, watch_collection
from conveyor_kube.watched_list import WatchedList


class Source(Protocol):
    """Fills the sinks of a catalog: `services`, `slices`, `claims` and `keys`, and in a cluster its `issuer`."""

    @property
    def states(self) -> Sequence[WatchState]:
        """The states of the watches that must have synced before the gateway is ready."""
        ...

    def filling(self, catalog: Catalog, queues: Queues, tokens: EngineTokens) -> AbstractAsyncContextManager[None]:
        """Keep the catalog up to date, and the number of gateways that share each queue's limit, until the exit.

        In a cluster, `tokens` gets its source too.
        """
        ...


class ClusterSource:
    """Watches InferenceServices, EndpointSlices, ServedNames, APIKeys and the gateways of a cluster."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        namespaces = settings.watch_namespaces
        by_namespace = namespaces or ("",)
        all_claims = sorted({*namespaces, settings.system_namespace}) if namespaces else ("",)
        self._services = [_begin(service_collection(each)) for each in by_namespace]
        self._slices = [_begin(slice_collection(each)) for each in by_namespace]
        self._keys = [_begin(key_collection(each)) for each in by_namespace]
        self._claims = [_begin(claim_collection(each)) for each in all_claims]

    @property
    def states(self) -> list[WatchState]:
        return [state for _, state in (*self._services, *self._slices, *self._claims, *self._keys)]

    @asynccontextmanager
    async def filling(self, catalog: Catalog, queues: Queues, tokens: EngineTokens) -> AsyncIterator[None]:
        """Run the watches. Raises SettingsError if no API server is configured."""
        sinks: list[tuple[list[tuple[Collection, WatchState]], Sink]] = [
            (self._services, catalog.services),
            (self._slices, catalog.slices),
            (self._claims, catalog.claims),
            (self._keys, catalog.keys),
            ([_begin(gateway_slices(self._settings.system_namespace))], _count_gateways(queues)),
        ]
        async with connect(self._settings.kubeconfig) as client, asyncio.TaskGroup() as tasks:
            watches = [
                tasks.create_task(watch_collection(client, collection, sink, state))
                for watched, sink in sinks
                for collection, state in watched
            ]
            settings, issuer = self._settings, catalog.issuer
            tokens.begin(partial(request_token, client, settings.system_namespace, settings.service_account))
            issuer.begin()
            following = follow_issuer(client, issuer.set_keys, issuer.note_attempt, issuer.wanted, SHORTEST_SECONDS)
            watches.append(tasks.create_task(following))
            yield
            for watch in watches:
                watch.cancel()


def _begin(collection: Collection) -> tuple[Collection, WatchState]:
    return collection, WatchState(collection.name)


def _count_gateways(queues: Queues) -> WatchedList:
    """Return the sink that counts the gateways. The gateway serves requests even before this watch has synced."""
    unreadable = Unreadable("slice", "it is ignored")

    def count(bodies: list[Json]) -> None:
        queues.set_num_gateways(sum(gateway.serving for gateway in parse_gateways(bodies, unreadable)))

    return WatchedList(count)
