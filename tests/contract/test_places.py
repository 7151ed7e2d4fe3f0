"""Tests places on engines that compute nothing, granted to gateways in other processes. No place stays empty."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import pytest
from tests.contract.serving import add_engine, complete, serving
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineServer]]:
    """Two engines, each of which runs four requests at once."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                EngineServer(
                    tmp_path_factory.mktemp("e"), model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192
                )
            )
            for _ in range(2)
        ]
        yield [engine.wait_ready() for engine in started]


@pytest.fixture
def static_engines(tmp_path: Path) -> Iterator[list[EngineServer]]:
    """Two engines with static batches of four requests. A batch that is not full waits for ten minutes."""
    model = write_chat_model(tmp_path / "tiny")
    limits = {"max_num_seqs": 4, "num_kv_blocks": 8192, "batching_mode": "static", "batching_window_seconds": 600}
    with ExitStack() as stack:
        started = [
            stack.enter_context(EngineServer(tmp_path / str(number), model, IDLE, host="0.0.0.0", **limits))
            for number in range(2)
        ]
        yield [engine.wait_ready() for engine in started]


@pytest.fixture(scope="module", params=[pytest.param(2, marks=pytest.mark.nightly), 8])  # 8: more than places
def gateways(crd: Api, kubeconfig: Path, request: pytest.FixtureRequest) -> Iterator[list[GatewayProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(GatewayProcess(kubeconfig)) for _ in range(request.param)]


async def test_what_waits_waits_in_the_gateways_and_no_place_stays_empty(
    engines: list[EngineServer], gateways: list[GatewayProcess], crd: Api, namespace: str
) -> None:
    first, second = engines
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        serving(first, gateways, crd, namespace) as service,
        asyncio.TaskGroup() as group,
    ):
        clients = [group.create_task(complete(session, gateways[i % len(gateways)], service)) for i in range(16)]
        await asyncio.to_thread(first.wait_load, running=4, waiting=1)
        await add_engine(second, Cluster(crd, namespace))
        await asyncio.to_thread(second.wait_load, running=4, waiting=1)
        for left in (12, 8):
            for client in clients[left:]:
                client.cancel()
            clients = clients[:left]
            for engine in engines:
                await asyncio.to_thread(engine.wait_load, running=4)
        for client in clients:
            client.cancel()
        for engine in engines:
            await asyncio.to_thread(engine.wait_load, running=0, waiting=0)


async def test_a_gateway_that_dies_gives_its_places_back(
    engines: list[EngineServer], gateways: list[GatewayProcess], crd: Api, kubeconfig: Path, namespace: str
) -> None:
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        asyncio.TaskGroup() as group,
    ):
        with GatewayProcess(kubeconfig) as dying:
            async with serving(engines[0], [*gateways, dying], crd, namespace) as service:
                lost = [group.create_task(complete_in_vain(session, dying, service)) for _ in range(10)]
                await asyncio.to_thread(engines[0].wait_load, running=4, waiting=1)
                clients = [
                    group.create_task(complete(session, gateway, service)) for gateway in gateways for _ in range(4)
                ]
                await asyncio.sleep(0.2)
                await asyncio.to_thread(dying.kill)
                await asyncio.gather(*lost)
                await asyncio.to_thread(engines[0].wait_load, running=4, waiting=1)
                for client in clients:
                    client.cancel()


async def complete_in_vain(session: aiohttp.ClientSession, gateway: GatewayProcess, service: str) -> None:
    with pytest.raises(aiohttp.ClientError):
        await complete(session, gateway, service)


async def test_a_batch_is_filled_before_the_next_engine_begins_one(
    static_engines: list[EngineServer], gateways: list[GatewayProcess], crd: Api, namespace: str
) -> None:
    first, second = static_engines
    async with (
        aiohttp.ClientSession() as session,
        serving(first, gateways, crd, namespace, mode="Static", window="600s") as service,
    ):
        await add_engine(second, Cluster(crd, namespace))
        async with asyncio.timeout(120):
            for gateway in gateways:
                while await asyncio.to_thread(num_engines, gateway, namespace) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        for number in (1, 2):
            await asyncio.gather(
                *(complete_five_tokens(session, gateways[i % len(gateways)], service) for i in range(4))
            )
            assert sum([await asyncio.to_thread(count_full_batches, engine) for engine in static_engines]) == number


def num_engines(gateway: GatewayProcess, namespace: str) -> float:
    return gateway.metric("conveyor_gateway_engines", namespace=namespace, inference_service="tiny")


def count_full_batches(engine: EngineServer) -> int:
    lines = [line for line in engine.get("/metrics").text.splitlines() if 'reason="full"' in line]
    return sum(int(float(line.split()[-1])) for line in lines)


async def complete_five_tokens(session: aiohttp.ClientSession, gateway: GatewayProcess, service: str) -> None:
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True}
    async with session.post(f"{gateway.url}/{service}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
