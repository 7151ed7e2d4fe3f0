"""Tests inference_queue_depth: an engine that computes nothing, gateways, and the metrics server's sum."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict
from pathlib import Path

import aiohttp
import pytest
from tests.contract.serving import complete, serving
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.process import GatewayProcess

from conveyor_kube.gateways import Gateway
from conveyor_kube.watch import WatchState
from conveyor_metrics.source import GatewaySource
from e2e.cluster.api import Api

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine that runs four requests at once."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("engine")
    with EngineServer(folder, model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def gateways(crd: Api, kubeconfig: Path) -> Iterator[list[GatewayProcess]]:
    with GatewayProcess(kubeconfig) as one, GatewayProcess(kubeconfig) as two:
        yield [one, two]


@pytest.fixture(scope="module")
def short_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine with places for four requests, but with blocks only for two requests of a thousand tokens."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("engine")
    limits = {"max_num_seqs": 4, "max_model_len": 2048, "num_kv_blocks": 160}
    with EngineServer(folder, model, host="0.0.0.0", **limits) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def steered_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine with an objective that is met with any limit."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    folder = tmp_path_factory.mktemp("engine")
    limits = {"max_num_seqs": 4, "objective_inter_token_latency_seconds": 3600, "batching_mode": "continuous"}
    with EngineServer(folder, model, IDLE, host="0.0.0.0", num_kv_blocks=8192, **limits) as started:
        yield started.wait_ready()


@pytest.fixture
async def steered_service(
    steered_engine: EngineServer, gateways: list[GatewayProcess], crd: Api, namespace: str
) -> AsyncIterator[str]:
    async with serving(steered_engine, gateways, crd, namespace) as service:
        yield service


@pytest.fixture
async def service(engine: EngineServer, gateways: list[GatewayProcess], crd: Api, namespace: str) -> AsyncIterator[str]:
    async with serving(engine, gateways, crd, namespace) as service:
        yield service


@pytest.fixture
async def short_service(
    short_engine: EngineServer, gateways: list[GatewayProcess], crd: Api, namespace: str
) -> AsyncIterator[str]:
    async with serving(short_engine, gateways, crd, namespace) as service:
        yield service


@pytest.mark.parametrize("clients", [(10, 0), (5, 5), (1, 9)])
async def test_ten_clients_of_an_engine_that_runs_four_are_a_depth_of_six(
    gateways: list[GatewayProcess], service: str, clients: tuple[int, int]
) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        source = make_source(session, gateways)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(complete(session, gateway, service))
                for gateway, number in zip(gateways, clients, strict=True)
                for _ in range(number)
            ]
            async with asyncio.timeout(60):  # the depth is known before the engine has placed all of them
                while await asyncio.to_thread(queue_depths_of_the_engine, gateways, service) != {1}:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            await eventually(source, service, in_flight=10, queue_depth=6)
            for task in tasks[:7]:
                task.cancel()
            await eventually(source, service, in_flight=3, queue_depth=0)
            for task in tasks[7:]:
                task.cancel()
        await eventually(source, service, in_flight=0, queue_depth=0)


async def test_requests_take_more_places_where_the_cache_carries_half_of_the_batch(
    gateways: list[GatewayProcess], short_engine: EngineServer, short_service: str
) -> None:
    assert short_engine.metric("conveyor_engine_capacity") == 4
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        source = make_source(session, gateways)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(send_again(session, gateways[number % 2], short_service, number))
                for number in range(6)
            ]
            await eventually(source, short_service, in_flight=12)
            assert await asyncio.to_thread(short_engine.metric, "conveyor_engine_capacity") == 2
            for task in tasks:
                task.cancel()
    await asyncio.to_thread(short_engine.wait_load, running=0, waiting=0, carried=2)


async def test_the_limit_that_objectives_set_arrives_with_its_reason(
    gateways: list[GatewayProcess], steered_service: str
) -> None:
    async with aiohttp.ClientSession() as session:
        source, request = (
            make_source(session, gateways),
            asyncio.create_task(complete(session, gateways[0], steered_service)),
        )
        async with asyncio.timeout(60):
            while not (found := await source.read_demand(steered_service)).limited_engines:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert (found.running_limit, found.limited_engines) == (4, {"declared": 1})
        request.cancel()


def make_source(session: aiohttp.ClientSession, gateways: list[GatewayProcess]) -> GatewaySource:
    source = GatewaySource(session, 5, WatchState("endpointslices", synced=True, received_at=time.monotonic()))
    source.gateways = tuple(Gateway("127.0.0.1", gateway.admin_port, serving=True) for gateway in gateways)
    return source


async def send_again(session: aiohttp.ClientSession, gateway: GatewayProcess, service: str, number: int) -> None:
    """Send requests as one client, with a prompt whose blocks no other request shares."""
    body = {"prompt": [10 + number] * 1000, "max_tokens": 100, "ignore_eos": True}
    while True:
        async with session.post(f"{gateway.url}/{service}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()


def queue_depths_of_the_engine(gateways: list[GatewayProcess], service: str) -> set[int | None]:
    """Return how many requests wait in the engine, as it told each gateway that has requests there."""
    demands = [json.loads(gateway.admin(f"/demand?service={service}")[1]) for gateway in gateways]
    return {engine["waiting"] for demand in demands for engine in demand["services"][service]["engines"].values()}


async def eventually(source: GatewaySource, service: str, **expected: int) -> None:
    deadline = time.monotonic() + 60
    while not expected.items() <= asdict(demand := await source.read_demand(service)).items():
        assert time.monotonic() < deadline, f"still {demand}"
        await asyncio.sleep(0.05)
