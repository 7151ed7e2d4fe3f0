"""Tests the sum over real gateways while one of them is killed and another one starts in its place."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
from tests.gateway.cluster import Cluster, own_address, publish_gateway
from tests.gateway.engine_servers import SlowEngine, running_engine
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import SLICES, Aggregated

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import ApiError
from e2e.cluster.definitions import claim_name, install_definitions

NAMESPACE = "doors"
KEY = f"{NAMESPACE}/door"


def read_in_flight(aggregated: Aggregated) -> str:
    """Return what the HPA reads; the status if the metrics API refuses."""
    try:
        return str(aggregated.value("door", namespace=NAMESPACE)["items"][0]["value"])
    except ApiError as error:
        return str(error.code)


@contextlib.asynccontextmanager
async def holding(gateway: GatewayProcess, count: int) -> AsyncIterator[None]:
    """Have this many requests in flight at the gateway."""
    async with aiohttp.ClientSession() as http:

        async def post() -> None:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.post(f"{gateway.url}/{KEY}/v1/completions", json={"prompt": ""}) as answer:
                    await answer.read()

        requests = [asyncio.create_task(post()) for _ in range(count)]
        try:
            yield
        finally:
            for request in requests:
                request.cancel()
            await asyncio.wait(requests)


async def test_no_reading_is_below_what_the_remaining_gateway_holds(aggregated: Aggregated) -> None:
    api, plane, engine = aggregated.api, aggregated.plane, SlowEngine()
    install_definitions(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    cluster = Cluster(api, NAMESPACE)
    aggregated.set_gateways()

    async def wait_for(value: str) -> None:
        while await asyncio.to_thread(read_in_flight, aggregated) != value:  # noqa: ASYNC110
            await asyncio.sleep(0.05)

    async def read_until(ended: asyncio.Event) -> list[str]:
        values = []
        while not ended.is_set():
            values.append(await asyncio.to_thread(read_in_flight, aggregated))
        return values

    with GatewayProcess(plane.kubeconfig, "--host=") as killed, GatewayProcess(plane.kubeconfig, "--host=") as staying:
        cluster.apply_service("door", batching={"maxBatchSize": 16})
        claim_name(api, NAMESPACE, "door")
        for name, gateway in (("killed", killed), ("staying", staying)):
            publish_gateway(api, SYSTEM_NAMESPACE, name, gateway.admin_port)
        async with running_engine(engine.handle) as server:
            cluster.apply_engine("door", own_address(), server.port)
            async with holding(killed, 7), holding(staying, 5):
                await wait_for("12")
                ended = asyncio.Event()
                reading = asyncio.create_task(read_until(ended))
                killed.process.kill()
                await asyncio.sleep(0.5)
                await asyncio.to_thread(api.delete, f"{SLICES}/killed")
                with GatewayProcess(plane.kubeconfig, "--host=") as new:
                    publish_gateway(api, SYSTEM_NAMESPACE, "new", new.admin_port, serving=False)
                    await asyncio.sleep(0.5)
                    publish_gateway(api, SYSTEM_NAMESPACE, "new", new.admin_port)
                    await asyncio.sleep(0.5)
                    ended.set()
                    values = await reading
    api.delete(f"{SLICES}/staying")
    api.delete(f"{SLICES}/new")
    assert set(values) <= {"12", "5", "503"}, values
    assert values[-1] == "5"
