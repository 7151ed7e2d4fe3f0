"""A gateway process on a real API server, and what a test needs to give it services and engines."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_api import names
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def api(control_plane: ControlPlane) -> Api:
    """With the CRD served."""
    api = Api(control_plane.kubeconfig)
    crd = yaml.safe_load((REPOSITORY / "crds" / f"{names.CRD_NAME}.yaml").read_text(encoding="utf-8"))
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{names.CRD_NAME}", crd)
    path = f"/apis/{names.GROUP}/{names.VERSION}/{names.PLURAL}"
    wait_until("the CRD", lambda: api.reachable(path), 20, lambda: None)
    return api


@pytest.fixture
def cluster(api: Api, namespace: str) -> Cluster:
    return Cluster(api, namespace)


@pytest.fixture(scope="session")
def gateway(api: Api, control_plane: ControlPlane) -> Iterator[GatewayProcess]:
    """One for all tests: each has its own namespace. Those that end a gateway start their own."""
    with GatewayProcess(control_plane.kubeconfig) as started:
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
