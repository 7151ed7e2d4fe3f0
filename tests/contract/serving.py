"""Runs real gateways with real engines, and clients with long requests."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

LONG = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True}


@asynccontextmanager
async def serving(
    engine: EngineServer, gateways: list[GatewayProcess], crd: Api, namespace: str, **batching: str
) -> AsyncIterator[str]:
    """Create a service with this engine, and wait until the gateways know it."""
    cluster = Cluster(crd, namespace)
    await asyncio.to_thread(cluster.apply_service, "tiny", batching={"maxBatchSize": 4, **batching})
    await add_engine(engine, cluster)
    labels = {"namespace": namespace, "inference_service": "tiny"}
    async with asyncio.timeout(120):
        for gateway in gateways:
            while not await asyncio.to_thread(gateway.metric, "conveyor_gateway_engines", **labels):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    yield f"{namespace}/tiny"
    await asyncio.to_thread(cluster.delete_service, "tiny")


async def add_engine(engine: EngineServer, cluster: Cluster) -> None:
    """Add an engine to the service `tiny`."""
    port = int(engine.url.rpartition(":")[2])
    await asyncio.to_thread(cluster.apply_engine, "tiny", own_address(), port)


async def complete(session: aiohttp.ClientSession, gateway: GatewayProcess, service: str) -> None:
    async with session.post(f"{gateway.url}/{service}/v1/completions", json=LONG) as response:
        raise AssertionError(f"answered too soon: {response.status} {await response.text()}")
