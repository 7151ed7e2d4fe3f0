"""Tests that one tenant cannot shut others out of a gateway, by whatever the gateway holds for it."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.engine_servers import EVENT_STREAM, answering, begin_stream, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_api.endpoints import ENDPOINTS, Endpoint, EndpointKind
from e2e.cluster.api import Api

MAX_CONNECTIONS = 32  # 28 of them may have requests, and 25 those of one namespace
MAX_HELD_BYTES = 4 << 20


class Tenants:
    """A gateway with small limits, an attacker's namespace, and another one whose service `qwen` answers."""

    def __init__(self, gateway: GatewayProcess, attacker: Cluster, other: Cluster) -> None:
        self.gateway, self.attacker, self.other = gateway, attacker, other
        self.stack = Stack(gateway, other)  # waits for what the gateway knows
        self.writers: list[asyncio.StreamWriter] = []

    async def apply_attacker(self, name: str, port: int) -> None:
        limits = {"queue": {"maxRequests": 100_000, "timeout": "1h"}, "requestTimeout": "2h"}
        batching = {"mode": "Continuous", "maxBatchSize": 512}
        await asyncio.to_thread(self.attacker.apply_service, name, batching=batching, **limits)
        await asyncio.to_thread(self.attacker.apply_engine, name, own_address(), port)
        labels = {"namespace": self.attacker.namespace, "inference_service": name}
        await self.stack.wait(lambda: self.gateway.metric("conveyor_gateway_engines", **labels) == 1)

    async def connect(self, request: str, address: str = "127.0.0.2") -> asyncio.StreamReader:
        """Send a request on a new connection, which stays open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.gateway.port, local_addr=(address, 0))
        self.writers.append(writer)
        self.write(f"{request} HTTP/1.1\r\nHost: localhost\r\n".encode())
        return reader

    def write(self, data: bytes) -> None:
        """Send more on the newest connection."""
        self.writers[-1].write(data)

    async def post(self, service: str, address: str = "127.0.0.2") -> asyncio.StreamReader:
        reader = await self.connect(f"POST /{self.attacker.namespace}/{service}/v1/completions", address)
        self.write(b"Content-Length: 2\r\n\r\n{}")
        return reader

    async def get(self, service: str, path: str, address: str = "127.0.0.2") -> asyncio.StreamReader:
        reader = await self.connect(f"GET /{self.attacker.namespace}/{service}{path}", address)
        self.write(b"\r\n")
        return reader

    async def find_refused(self, http: aiohttp.ClientSession, count: int = 40) -> list[str]:
        """Send requests of the other tenant on new connections. Return the answers that are not 200."""
        refused = []
        for _ in range(count):
            async with http.post(self.stack.completions, data=b"{}", headers={"Connection": "close"}) as answer:
                if answer.status != 200:
                    refused.append(await answer.text())
        return refused

    def held(self) -> float:
        return self.gateway.metric("conveyor_gateway_held_requests", namespace=self.attacker.namespace)


@pytest.fixture
async def tenants(crd: Api, kubeconfig: Path, cluster: Cluster) -> AsyncIterator[Tenants]:
    name = f"test-{uuid4().hex[:8]}"
    crd.create("/api/v1/namespaces", {"metadata": {"name": name}})
    attacker = Cluster(crd, name)
    flags = (f"--watch-namespaces={cluster.namespace},{name}", f"--max-connections={MAX_CONNECTIONS}")
    sizes = (f"--max-held-bytes={MAX_HELD_BYTES}", f"--max-request-bytes={MAX_HELD_BYTES // 2}")
    with GatewayProcess(kubeconfig, *flags, *sizes) as gateway:
        tenants = Tenants(gateway, attacker, cluster)
        async with running_engine(answering(web.Response, text="{}")) as engine:
            await tenants.stack.apply_service()
            await tenants.stack.add_engine(engine.port)
            yield tenants
            for writer in tenants.writers:
                writer.close()
    attacker.clear()


async def read_ended(readers: list[asyncio.StreamReader]) -> list[bytes]:
    """Return what the clients of ended connections have received."""
    received = []
    for reader in readers:
        with contextlib.suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(0.05):
                received.append(await reader.read())
    return received


async def test_streams_of_two_services_end_when_another_tenant_needs_their_place(
    tenants: Tenants, http: aiohttp.ClientSession
) -> None:
    begun = asyncio.Semaphore(0)

    async def stream(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, b"data: 1\n\n")
        begun.release()
        await asyncio.sleep(3600)
        return answer

    async with running_engine(stream) as engine:
        for name in ("one", "two"):
            await tenants.apply_attacker(name, engine.port)
        readers = []
        for number in range(MAX_CONNECTIONS + 8):
            readers.append(await tenants.post(("one", "two")[number % 2], f"127.0.0.{2 + number % 2}"))
        async with asyncio.timeout(60):
            for _ in range(20):
                await begun.acquire()
        others = [asyncio.create_task(tenants.find_refused(http, 10)) for _ in range(4)]
        assert await asyncio.gather(*others) == [[]] * 4
        ended = [each for each in await read_ended(readers) if b"data: 1" in each]
        for each in ended:
            assert b'"code": "evicted"' in each.split(b"data: ")[-1]
            assert each.endswith(b"0\r\n\r\n"), "the stream ends properly, and then the connection"


async def test_files_of_one_tenant_leave_memory_for_those_of_another(
    tenants: Tenants, http: aiohttp.ClientSession
) -> None:
    """One namespace gets at most seven eighths of the bytes. Bodies of its own that find no room get 503."""
    size_bytes = MAX_HELD_BYTES // 8
    await asyncio.to_thread(tenants.attacker.apply_service, "one")
    await tenants.stack.wait(lambda: tenants.gateway.demand(f"{tenants.attacker.namespace}/one") is not None)
    for _ in range(12):
        await tenants.connect(f"POST /{tenants.attacker.namespace}/one/v1/completions")
        tenants.write(f"Content-Length: {size_bytes}\r\n\r\n".encode() + b"x" * (size_bytes - 1))

    def held() -> float:
        return tenants.gateway.metric("conveyor_gateway_held_body_bytes")

    await tenants.stack.wait(lambda: held() > MAX_HELD_BYTES // 2)
    for _ in range(10):
        async with http.post(tenants.stack.completions, data=b"x" * size_bytes) as answer:
            assert answer.status == 200
        assert await asyncio.to_thread(held) <= MAX_HELD_BYTES


async def never(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError


async def test_documents_that_silent_engines_never_send_take_no_memory(
    tenants: Tenants, http: aiohttp.ClientSession
) -> None:
    async with running_engine(never) as engine:
        for name in ("one", "two"):
            await tenants.apply_attacker(name, engine.port)
        for number in range(MAX_HELD_BYTES >> 20):
            await tenants.get(("one", "two")[number % 2], "/openapi.json")
        await tenants.stack.wait(lambda: len(engine.requests) >= 2)
        assert await tenants.find_refused(http) == []
        assert tenants.gateway.metric("conveyor_gateway_held_body_bytes") == 0


async def test_pages_that_a_silent_engine_never_sends_take_no_connection_of_others(
    tenants: Tenants, http: aiohttp.ClientSession
) -> None:
    async with running_engine(never) as engine:
        await tenants.apply_attacker("one", engine.port)
        attacking = [asyncio.create_task(send_again(tenants, "one", "/health")) for _ in range(MAX_CONNECTIONS + 8)]
        await tenants.stack.wait(lambda: bool(engine.requests))
        assert await tenants.find_refused(http) == []
        for each in attacking:
            each.cancel()


async def send_again(tenants: Tenants, service: str, path: str) -> None:
    while True:
        with contextlib.suppress(ConnectionError):
            await (await tenants.get(service, path)).read()
        await asyncio.sleep(0.2)


async def test_of_one_service_s_pages_64_clients_wait_at_most(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    statuses: list[int] = []

    async def keep_sending() -> None:  # the fetch ends after 10 s, so on a busy machine it may not be the first one
        while True:
            async with http.get(f"{gateway.url}/{stack.key}/openapi.json") as answer:
                statuses.append(answer.status)

    def held() -> float:
        return gateway.metric("conveyor_gateway_held_requests", namespace=stack.cluster.namespace)

    async with running_engine(never) as engine:
        await stack.add_engine(engine.port)
        requests = [asyncio.create_task(keep_sending()) for _ in range(64)]
        await stack.wait(lambda: held() == 64 + 1)  # and the fetch
        requests.append(asyncio.create_task(keep_sending()))
        await stack.wait(lambda: 429 in statuses)
        assert await asyncio.to_thread(held) <= 64 + 1
        for each in requests:
            each.cancel()


async def test_usage_that_a_silent_engine_never_reports_leaves_that_of_others_counted(
    gateway: GatewayProcess, stack: Stack, cluster: Cluster
) -> None:
    """256 open queries for all services together were the limit."""

    def report(tokens: int) -> dict[str, int]:
        return {"prompt_tokens": 7, "cached_tokens": 0, "completion_tokens": tokens}

    async def stream(request: web.Request) -> web.StreamResponse:
        if request.path == "/usage":
            return await never(request)
        answer = web.StreamResponse(headers=EVENT_STREAM | {"X-Engine-Usage": json.dumps(report(1))})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        return await never(request)

    async def stream_and_report(request: web.Request) -> web.StreamResponse:
        return web.json_response(report(5)) if request.path == "/usage" else await stream(request)

    await stack.apply_service(batching={"mode": "Continuous", "maxBatchSize": 1024})
    async with running_engine(stream) as silent, running_engine(stream_and_report) as engine:
        await stack.add_engine(silent.port)
        await asyncio.to_thread(cluster.apply_service, "other")
        await asyncio.to_thread(cluster.apply_engine, "other", own_address(), engine.port)
        labels = {"namespace": cluster.namespace, "inference_service": "other"}
        await stack.wait(lambda: gateway.metric("conveyor_gateway_engines", **labels) == 1)
        streams = [await begin(gateway, stack.key) for _ in range(260)]
        last = await begin(gateway, f"{cluster.namespace}/other")
        for writer in (*streams, last):
            writer.close()
        await stack.wait(lambda: gateway.metric("conveyor_gateway_generation_tokens_total", **labels) > 0)
        assert gateway.metric("conveyor_gateway_generation_tokens_total", **labels) == 5


async def begin(gateway: GatewayProcess, service: str) -> asyncio.StreamWriter:
    """Open a stream. Returns after its first event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"POST /{service}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    await asyncio.wait_for(reader.readuntil(b"data: 1\n\n"), 60)
    return writer


TRIES = 5
WAITING = [
    each
    for each in ENDPOINTS
    if each.kind in (EndpointKind.ENGINE, EndpointKind.ENGINE_PAGE, EndpointKind.STATUS, EndpointKind.DESCRIBE)
]


async def test_whoever_waits_for_an_engine_has_a_hold_at_every_path(tenants: Tenants) -> None:
    """A new path without one fails here: the open connection is not counted."""
    gate, seen = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        if request.path == "/place":
            return web.Response(status=404)
        seen.set()
        await gate.wait()
        return web.Response(status=404)

    async with running_engine(wait) as engine:
        await tenants.apply_attacker("one", engine.port)
        for endpoint in WAITING:
            num_fetches = endpoint.kind is not EndpointKind.ENGINE
            for _ in range(TRIES):  # a page ends after 2 s, perhaps before a busy machine has counted
                gate.clear()
                seen.clear()
                reader = await tenants.connect(f"{endpoint.method} {_fill(endpoint, tenants)}")
                tenants.write(b"Content-Length: 2\r\n\r\n{}")
                async with asyncio.timeout(60):
                    await seen.wait()
                counted = await asyncio.to_thread(tenants.held)
                gate.set()
                assert (await reader.readline()).startswith(b"HTTP/1.1 ")
                tenants.writers[-1].close()
                await tenants.stack.wait(lambda: tenants.held() == 0)
                if counted == 1 + num_fetches:
                    break
            assert counted == 1 + num_fetches, endpoint.path


def _fill(endpoint: Endpoint, tenants: Tenants) -> str:
    path = endpoint.path.replace("{model}", "one").replace("{version}", "1")
    return f"/{tenants.attacker.namespace}/one{path}"


async def test_whoever_sends_a_body_has_a_hold_while_it_arrives(tenants: Tenants) -> None:
    await asyncio.to_thread(tenants.attacker.apply_service, "one")
    await tenants.stack.wait(lambda: tenants.gateway.demand(f"{tenants.attacker.namespace}/one") is not None)
    await tenants.connect(f"POST /{tenants.attacker.namespace}/one/v1/completions")
    tenants.write(b"Content-Length: 2\r\n\r\n{")
    await tenants.stack.wait(lambda: tenants.held() == 1)
    await tenants.connect("POST /v1/completions")
    tenants.write(b"Content-Length: 2\r\n\r\n{")
    await tenants.stack.wait(lambda: tenants.gateway.metric("conveyor_gateway_held_requests", namespace="") == 1)
