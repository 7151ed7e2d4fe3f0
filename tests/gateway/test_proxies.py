"""Tests a gateway behind real proxies: whose share a request takes, and which headers of the proxies an engine gets."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import Engine, answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

# By the client that they are about: the headers of proxies' documentation, behind a client that lies.
CHAINS = {
    "198.51.100.1": ["X-Forwarded-For: 203.0.113.9, 198.51.100.1"],  # nginx's $proxy_add_x_forwarded_for
    "198.51.100.2": ["x-forwarded-for: 203.0.113.9,198.51.100.2,127.0.0.9"],  # Envoy behind Envoy
    "198.51.100.3": ["X-Forwarded-For: 203.0.113.9", "X-Forwarded-For: 198.51.100.3"],  # HAProxy adds a header
    "198.51.100.4": ["X-Forwarded-For: 203.0.113.9, 198.51.100.4:33442"],  # Azure's and AWS's, with client ports
    "2001:db8:0:5::/64": ["X-Forwarded-For: 203.0.113.9, 2001:db8:0:5::7"],
    "127.0.0.1": ["Forwarded: for=203.0.113.9", "X-Real-IP: 203.0.113.9"],  # which a client can write, too
}


@pytest.fixture
async def behind(kubeconfig: Path, cluster: Cluster) -> AsyncIterator[tuple[Stack, Engine]]:
    flags = (f"--watch-namespaces={cluster.namespace}", "--trusted-proxies=127.0.0.0/8")
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, cluster)
        await stack.apply_service()
        async with running_engine(answering(web.Response, text="{}")) as engine:
            await stack.add_engine(engine.port)
            yield stack, engine


async def test_the_client_is_the_last_one_that_a_proxy_has_seen(behind: tuple[Stack, Engine]) -> None:
    stack, engine = behind
    for headers in CHAINS.values():
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
        lines = [f"POST /{stack.key}/v1/completions?api-key=secret HTTP/1.1", "Host: x", "Content-Length: 2", *headers]
        writer.write(("\r\n".join([*lines, "Connection: close", "", ""]) + "{}").encode())
        assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 200 ")
        writer.close()
    await stack.wait(lambda: sum("event=request " in line for line in stack.gateway.log) == len(CHAINS))
    logged = [line for line in stack.gateway.log if "event=request " in line]
    assert [line.partition("client=")[2].partition(" ")[0] for line in logged] == list(CHAINS)
    for request, _ in engine.requests:
        assert request.path_qs == "/v1/completions", "a query may hold a client's key"
        assert not {"X-Forwarded-For", "Forwarded", "X-Real-IP"} & set(request.headers)
