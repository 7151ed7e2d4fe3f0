"""Fixtures for a gateway process with a real API server, and for its services and engines."""

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
    """One gateway for all tests, each of which has its own namespace. Tests that end a gateway start their own."""
    with GatewayProcess(kubeconfig) as started:
        yield started


@pytest.fixture
async def stack(gateway: GatewayProcess, cluster: Cluster) -> Stack:
    """The service `qwen` with default settings and without engines. The gateway knows it."""
    stack = Stack(gateway, cluster)
    await stack.apply_service()
    return stack


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        yield session
