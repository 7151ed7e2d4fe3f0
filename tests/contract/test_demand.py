"""Tests that the metrics server understands a gateway's report of its demand. Both are real and use HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml
from tests.gateway.process import GatewayProcess

from conveyor_api.names import API_VERSION, KIND, PLURAL
from conveyor_kube.gateways import Gateway
from conveyor_kube.watch import WatchState
from conveyor_metrics.errors import NotFound, NotKnown
from conveyor_metrics.source import GatewaySource
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions


@pytest.fixture
def api(control_plane: ControlPlane) -> Api:
    api = Api(control_plane.kubeconfig)
    install_definitions(api)
    return api


@pytest.fixture
def gateways(api: Api, control_plane: ControlPlane, namespace: str) -> Iterator[list[GatewayProcess]]:
    """Two gateways that know the service `qwen` in this namespace. It has no engine, so its requests wait."""
    service = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "qwen"},
        "spec": {"model": {"uri": "pvc://models/tiny"}, "batching": {"maxBatchSize": 2}},
    }
    api.create(f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}", service)
    flags = ("--watch-namespaces", namespace, "--drain-delay-seconds", "0")
    with (
        GatewayProcess(control_plane.kubeconfig, *flags) as one,
        GatewayProcess(control_plane.kubeconfig, *flags) as two,
    ):
        yield [one, two]


@pytest.fixture
async def source(gateways: list[GatewayProcess]) -> AsyncIterator[GatewaySource]:
    async with aiohttp.ClientSession() as session:
        watch = WatchState("endpointslices", synced=True, received_at=float("inf"))  # it never grows silent
        source = GatewaySource(session, 2, watch)
        source.gateways = tuple(Gateway("127.0.0.1", gateway.admin_port, serving=True) for gateway in gateways)
        yield source


@pytest.mark.slow
async def test_waiting_requests_of_all_gateways_are_summed_also_while_one_drains(
    gateways: list[GatewayProcess], source: GatewaySource, namespace: str
) -> None:
    service = f"{namespace}/qwen"
    assert await read_counts(source, service) == (0, 0)
    async with aiohttp.ClientSession() as session:
        tasks = [asyncio.create_task(send(session, gateway, namespace)) for gateway in (*gateways, gateways[0])]
        await eventually((3, 3), lambda: read_counts(source, service))
        gateways[0].terminate()
        await eventually("draining", lambda: read_state(gateways[0]))
        assert await read_counts(source, service) == (3, 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.slow
async def test_a_gateway_returns_only_the_one_service_of_the_query(
    gateways: list[GatewayProcess], source: GatewaySource, namespace: str, api: Api
) -> None:
    other = {"metadata": {"name": "other"}, "spec": {"model": {"uri": "pvc://models/tiny"}}}
    services = f"/apis/{API_VERSION}/namespaces/{namespace}/{PLURAL}"
    api.create(services, {"apiVersion": API_VERSION, "kind": KIND, **other})
    await eventually((0, 0), lambda: read_if_known(source, f"{namespace}/other"))
    _, text = await asyncio.to_thread(gateways[0].admin, f"/demand?service={namespace}/other")
    assert list(json.loads(text)["services"]) == [f"{namespace}/other"]
    with pytest.raises(NotFound):
        await source.read_demand(f"{namespace}/nobody")


@pytest.fixture
def unsynced(kubeconfig: Path, tmp_path: Path) -> Iterator[GatewayProcess]:
    """A gateway that cannot reach an API server."""
    config = yaml.safe_load(kubeconfig.read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
    gateway = GatewayProcess(tmp_path / "kubeconfig")
    try:
        with pytest.raises(TimeoutError):
            gateway.start(timeout_seconds=0)
        yield gateway
    finally:
        gateway.kill()


async def test_a_gateway_that_has_never_synced_holds_nothing(
    source: GatewaySource, unsynced: GatewayProcess, namespace: str
) -> None:
    synced, source.gateways = source.gateways or (), (Gateway("127.0.0.1", unsynced.admin_port, serving=False),)
    with pytest.raises(NotKnown, match="no reachable gateway"):
        await source.read_demand(f"{namespace}/qwen")
    source.gateways += synced
    assert (await source.read_demand(f"{namespace}/qwen")).in_flight == 0


async def read_counts(source: GatewaySource, service: str) -> tuple[int, int]:
    """Return the numbers of requests in flight and waiting."""
    found = await source.read_demand(service)
    return found.in_flight, found.queue_depth


async def read_if_known(source: GatewaySource, service: str) -> tuple[int, int] | None:
    try:
        return await read_counts(source, service)
    except NotFound:
        return None


async def send(session: aiohttp.ClientSession, gateway: GatewayProcess, namespace: str) -> int:
    body = {"model": "qwen", "messages": [{"role": "user", "content": "Hello"}]}
    async with session.post(f"{gateway.url}/{namespace}/qwen/v1/chat/completions", json=body) as response:
        return response.status


async def read_state(gateway: GatewayProcess) -> str:
    _, text = await asyncio.to_thread(gateway.admin, "/readyz")
    return "draining" if "draining" in text else text


async def eventually(expected: object, read: Callable[[], Awaitable[object]]) -> None:
    """Wait for a result, because requests and signals arrive a moment after they were sent."""
    async with asyncio.timeout(120):
        while await read() != expected:  # noqa: ASYNC110  another process has no event to wait for
            await asyncio.sleep(0.05)
