"""A gateway process on a real API server, and what a test needs to give it services and engines."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from e2e.cluster.api import Api


@pytest.fixture
def cluster(crd: Api, namespace: str) -> Iterator[Cluster]:
    cluster = Cluster(crd, namespace)
    yield cluster
    cluster.clear()


@pytest.fixture(scope="session")
def gateway(crd: Api, kubeconfig: Path) -> Iterator[GatewayProcess]:
    """One for all tests: each has its own namespace. Those that end a gateway start their own."""
    with GatewayProcess(kubeconfig) as started:
        yield started


@pytest.fixture
async def stack(gateway: GatewayProcess, cluster: Cluster) -> Stack:
    """The service `qwen` with default settings, known to the gateway, without engines."""
    stack = Stack(gateway, cluster)
    await stack.apply_service()
    return stack


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session
