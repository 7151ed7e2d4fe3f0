"""Tests that a gateway that holds its maximum number of requests still answers the clients of other services."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

MAX_CONNECTIONS = 32


@pytest.fixture
async def full(kubeconfig: Path, cluster: Cluster) -> AsyncIterator[tuple[Stack, list[asyncio.StreamReader]]]:
    """Fill the gateway with one client's requests for `qwen`, which has no engine, on more connections than allowed."""
    flags = (f"--watch-namespaces={cluster.namespace}", f"--max-connections={MAX_CONNECTIONS}")
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, cluster)
        await stack.apply_service(queue={"maxRequests": 100_000, "timeout": "1h"}, requestTimeout="2h")
        sent = f"POST /{stack.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\nx".encode()
        readers, writers = [], []
        for _ in range(MAX_CONNECTIONS + 10):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(sent)
            readers.append(reader)
            writers.append(writer)
        await stack.wait(lambda: stack.demand()["queued"] >= MAX_CONNECTIONS // 2)
        yield stack, readers
        for writer in writers:
            writer.close()


async def test_requests_that_wait_for_one_service_shut_nobody_out_of_another(
    full: tuple[Stack, list[asyncio.StreamReader]], http: aiohttp.ClientSession
) -> None:
    stack, readers = full
    async with running_engine(answering(web.Response, text="{}")) as engine:
        other = Stack(stack.gateway, stack.cluster)
        await asyncio.to_thread(stack.cluster.apply_service, "other")
        await asyncio.to_thread(stack.cluster.apply_engine, "other", own_address(), engine.port)
        labels = {"namespace": stack.cluster.namespace, "inference_service": "other"}
        await other.wait(lambda: stack.gateway.metric("conveyor_gateway_engines", **labels) == 1)
        url = f"{stack.gateway.url}/{stack.cluster.namespace}/other/v1/completions"
        for _ in range(MAX_CONNECTIONS):
            async with http.post(url, data=b"{}", headers={"Connection": "close"}) as answer:
                assert answer.status == 200, await answer.text()
    requests = [
        asyncio.create_task(post(http, stack.completions)) for _ in range(2)
    ]  # the first one takes the last room
    refused, _ = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
    assert [(each.result()[0], each.result()[1]["error"]["code"]) for each in refused] == [(429, "too_many_requests")]
    assert [each.result()[2]["Connection"] for each in refused] == ["close"]
    for each in requests:
        each.cancel()
    received = b""
    for reader in readers:
        with contextlib.suppress(TimeoutError, ConnectionError):
            received += await asyncio.wait_for(reader.read(1000), 0.05)
    assert b"HTTP/1.1 429 " in received


async def test_clients_that_open_more_connections_than_there_are_descriptors_shut_nobody_out(
    kubeconfig: Path, cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    max_open_files = 750
    with (
        GatewayProcess(kubeconfig, f"--watch-namespaces={cluster.namespace}", max_open_files=max_open_files) as gateway,
        contextlib.ExitStack() as clients,
    ):
        assert any("event=few_open_files limit=750 max_connections=" in line for line in gateway.log)
        for _ in range(max_open_files):
            clients.enter_context(socket.create_connection(("127.0.0.1", gateway.port), 20, ("127.0.0.2", 0)))
        for _ in range(20):
            async with http.get(f"{gateway.url}/healthz", headers={"Connection": "close"}) as answer:
                assert answer.status == 200
        assert gateway.admin("/readyz")[0] == 200
        assert not any("event=accept_failed" in line for line in gateway.log)
