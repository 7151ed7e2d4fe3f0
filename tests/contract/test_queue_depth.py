"""inference_queue_depth, from an engine (one that computes nothing) through gateways to the metrics server's sum."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp
import pytest
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_kube.watch import WatchState
from conveyor_metrics.demand import ServiceDemand
from conveyor_metrics.source import Gateway, GatewaySource
from e2e.cluster.api import Api

LONG = {"prompt": "x", "max_tokens": 8_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """Runs four requests at once."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("engine")
    with EngineServer(folder, model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def gateways(crd: Api, kubeconfig: Path) -> Iterator[list[GatewayProcess]]:
    with GatewayProcess(kubeconfig) as one, GatewayProcess(kubeconfig) as two:
        yield [one, two]


@pytest.fixture
async def service(engine: EngineServer, gateways: list[GatewayProcess], crd: Api, namespace: str) -> AsyncIterator[str]:
    """The service of that engine, known to both gateways."""
    cluster = Cluster(crd, namespace)
    await asyncio.to_thread(cluster.apply_service, "tiny", batching={"maxBatchSize": 4})
    port = int(engine.url.rpartition(":")[2])
    await asyncio.to_thread(cluster.apply_engine, "tiny", own_address(), port)
    labels = {"namespace": namespace, "inference_service": "tiny"}
    async with asyncio.timeout(120):
        for gateway in gateways:
            while not await asyncio.to_thread(gateway.metric, "conveyor_gateway_engines", **labels):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    yield f"{namespace}/tiny"
    await asyncio.to_thread(cluster.delete_service, "tiny")


@pytest.mark.parametrize(("clients", "inside"), [((10, 0), 1), ((5, 5), 6), ((1, 9), 2)])
async def test_ten_clients_of_an_engine_that_runs_four_are_a_depth_of_six(
    gateways: list[GatewayProcess], service: str, clients: tuple[int, int], inside: int
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        watch = WatchState("endpointslices", synced=True, heard_at=time.monotonic())
        source = GatewaySource(session, 5, watch)
        source.gateways = tuple(Gateway("127.0.0.1", gateway.admin_port, serving=True) for gateway in gateways)
        async with asyncio.TaskGroup() as asking:
            tasks = [
                asking.create_task(ask(session, gateway, service))
                for gateway, number in zip(gateways, clients, strict=True)
                for _ in range(number)
            ]
            async with asyncio.timeout(60):  # the depth is known before the engine has placed all of them
                while await asyncio.to_thread(told_by_the_engine, gateways, service) != {inside}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await eventually(source, service, ServiceDemand(in_flight=10, queue_depth=6))
            for task in tasks[:7]:
                task.cancel()
            await eventually(source, service, ServiceDemand(in_flight=3, queue_depth=0))
            for task in tasks[7:]:
                task.cancel()
        await eventually(source, service, ServiceDemand(in_flight=0, queue_depth=0))


def told_by_the_engine(gateways: list[GatewayProcess], service: str) -> set[int | None]:
    """How many wait inside it, as each gateway that has requests there heard."""
    demands = [json.loads(gateway.admin(f"/demand?service={service}")[1]) for gateway in gateways]
    return {engine["waiting"] for demand in demands for engine in demand["services"][service]["engines"].values()}


async def ask(session: aiohttp.ClientSession, gateway: GatewayProcess, service: str) -> None:
    async with session.post(f"{gateway.url}/{service}/v1/completions", json=LONG) as response:
        raise AssertionError(f"answered too soon: {response.status} {await response.text()}")


async def eventually(source: GatewaySource, service: str, expected: ServiceDemand) -> None:
    deadline = time.monotonic() + 60
    while (demand := await source.read_demand(service)) != expected:
        assert time.monotonic() < deadline, f"still {demand}"
        await asyncio.sleep(0.05)
