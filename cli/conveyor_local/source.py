"""The gateway's source of objects without a cluster: this process puts them in. A `conveyor_gateway.sources.Source`.

`service` puts in the InferenceService with its status, and an EndpointSlice for each ready engine, because each engine
has a port of its own. The APIKeys are those of the files. This module claims the names, as the operator does.
"""

from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_api.served_name import build_served_name, may_claim, root_name
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.engines.tokens import EngineTokens
from conveyor_gateway.watching.catalog import Catalog
from conveyor_kube.watch import WatchState

Object = dict[str, Any]


class LocalSource:
    """Keeps the objects that the gateway knows."""

    states: Sequence[WatchState] = ()  # nothing has to be listed first

    def __init__(self, services: Iterable[InferenceService], keys: Iterable[Object], created_at: str) -> None:
        self._services = list(services)
        self._keys = list(keys)
        self._created_at = created_at
        self._known: dict[str, Object] = {}
        self._catalog: Catalog | None = None

    @asynccontextmanager
    async def filling(self, catalog: Catalog, queues: Queues, tokens: EngineTokens) -> AsyncIterator[None]:
        self._catalog = catalog
        for body in self._known.values():
            catalog.services.put(body)
        for body in self._keys:
            catalog.keys.put(body)
        for number, (namespace, name) in enumerate(self._list_names()):
            catalog.claims.put(self._build_claim(number, namespace, name))
        yield
        self._catalog = None

    def _list_names(self) -> Iterable[tuple[str, str]]:
        """Return each served name with the namespace that claims it. The name of the gateways is the last one."""
        claims = ((each.namespace, each.served_model_name) for each in self._services)
        yield from (claim for claim in claims if may_claim(*claim))
        yield names.SYSTEM_NAMESPACE, root_name(names.SYSTEM_NAMESPACE)

    def _build_claim(self, number: int, namespace: str, name: str) -> Object:
        claim = build_served_name(namespace, name)
        return {**claim, "metadata": {**claim["metadata"], "uid": str(number), "creationTimestamp": self._created_at}}

    def put_service(self, body: Object) -> None:
        """Add or change an InferenceService."""
        metadata = body["metadata"]
        self._known[f"{metadata['namespace']}/{metadata['name']}"] = body
        if self._catalog is not None:
            self._catalog.services.put(body)

    def put_engine(self, service: InferenceService, pod: str, uid: str, port: int) -> None:
        """Add a ready engine."""
        if self._catalog is not None:
            self._catalog.slices.put(_build_slice(service, pod) | _build_endpoint(uid, port))

    def delete_engine(self, service: InferenceService, pod: str) -> None:
        """Remove an engine. Does nothing if it is not known."""
        if self._catalog is not None:
            self._catalog.slices.delete(_build_slice(service, pod))


def _build_slice(service: InferenceService, pod: str) -> Object:
    labels = {names.INFERENCE_SERVICE_LABEL: service.name}
    return {"metadata": {"namespace": service.namespace, "name": pod, "labels": labels}, "addressType": "IPv4"}


def _build_endpoint(uid: str, port: int) -> Object:
    endpoint = {"addresses": ["127.0.0.1"], "conditions": {"ready": True}, "targetRef": {"uid": uid}}
    return {"ports": [{"name": names.ENGINE_PORT_NAME, "port": port}], "endpoints": [endpoint]}
