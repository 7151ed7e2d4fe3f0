"""A gateway in the test's own event loop, with objects that the test puts in instead of a cluster."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import Handle, running_engine

from conveyor_api import names
from conveyor_api.api_key import build_key, hash_key
from conveyor_api.resource import InferenceService
from conveyor_gateway.server import Server
from conveyor_gateway.settings import Settings
from conveyor_local.source import LocalSource

CREATED_AT = "2026-11-01T00:00:00Z"
MAX_OPEN_FILES = 4096
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class LocalGateway:
    """A gateway with one service, `NAMESPACE/NAME`."""

    server: Server
    service: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server._public.port}/{self.service}/v1"

    @property
    def admin_url(self) -> str:
        return f"http://127.0.0.1:{self.server.admin_port}"


def make_key(name: str, **spec: Any) -> tuple[str, Json]:
    """Return a key, and the APIKey `NAMESPACE/NAME` for it."""
    namespace, _, own_name = name.partition("/")
    key = build_key(namespace, name.encode().ljust(32, b"."))
    metadata = {"namespace": namespace, "name": own_name, "uid": name, "creationTimestamp": CREATED_AT}
    spec = {"hashes": [{"sha256": hash_key(key)}], **spec}
    return key, {"apiVersion": names.API_VERSION, "kind": names.API_KEY_KIND, "metadata": metadata, "spec": spec}


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Log no requests: only the program's own formatter writes the values that a request lacks."""
    log = logging.getLogger("conveyor_gateway")
    before = log.level
    log.setLevel(logging.WARNING)
    yield
    log.setLevel(before)


@contextlib.asynccontextmanager
async def local_gateway(
    handle: Handle, *keys: Json, settings: Json | None = None, **spec: Any
) -> AsyncIterator[LocalGateway]:
    """Run a gateway with the service `team/chat` and one engine, which answers with `handle`."""
    metadata = {"namespace": "team", "name": "chat", "uid": "1", "generation": 1, "creationTimestamp": CREATED_AT}
    body = {"apiVersion": names.API_VERSION, "kind": names.KIND, "metadata": metadata}
    body["spec"] = {"model": {"uri": "hf://org/chat"}, "batching": {"maxBatchSize": 4}, **spec}
    service = InferenceService.parse(body)
    source = LocalSource([service], keys, CREATED_AT)
    source.put_service(body)
    given = {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_delay_seconds": 0.0, **(settings or {})}
    server, stop, end_now = Server(Settings(**given), MAX_OPEN_FILES, source), asyncio.Event(), asyncio.Event()
    with without_log():
        async with running_engine(handle) as engine:
            running = asyncio.create_task(server.run(stop, end_now))
            await server.opened.wait()
            labels = {names.INFERENCE_SERVICE_LABEL: service.name}
            endpoint = {"addresses": [own_address()], "conditions": {"ready": True}, "targetRef": {"uid": "engine"}}
            server._catalog.slices.put(
                {
                    "metadata": {"namespace": service.namespace, "name": "engine", "labels": labels},
                    "addressType": "IPv4",
                    "ports": [{"name": names.ENGINE_PORT_NAME, "port": engine.port}],
                    "endpoints": [endpoint],
                }
            )
            try:
                yield LocalGateway(server, f"{service.namespace}/{service.name}")
            finally:
                stop.set()
                end_now.set()
                await running
