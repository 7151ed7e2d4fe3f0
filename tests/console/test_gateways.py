"""Tests which engines are read when, and that viewers share reads, with the page of a gateway that counts them."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.gateway.cluster import make_endpoint, make_slice, own_address

from conveyor_api.names import DEMAND_PATH
from conveyor_console.gateways import Gateways
from conveyor_kube.gateways import ADMIN_PORT_NAME
from conveyor_protocol.pages import Demand, Replicas, ServiceDemand

NAMES = [f"team/s{number:03}" for number in range(100)]
READY = ServiceDemand(5, 1, queued=0, dispatched=1, batch_size=8, replicas=Replicas(ready=1, starting=0, desired=1))


class Server:
    """A gateway's admin port with 100 busy services. `reads`: requests by path and service."""

    def __init__(self) -> None:
        self.reads = Counter[tuple[str, str]]()

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        service = request.query.get("service", "")
        self.reads[request.path, service] += 1
        if request.path == DEMAND_PATH:
            return web.Response(body=msgspec.json.encode(Demand(dict.fromkeys(NAMES, READY))))
        if request.path == "/engines":
            text = f"vllm:generation_tokens_total {100 * time.monotonic()}"
            return web.json_response({"engines": {"a": text}})
        await asyncio.sleep(0.05)
        return web.json_response({"engines": {}} if request.path == "/steps" else {"receipts": []})


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def gateways(server: Server) -> AsyncIterator[Gateways]:
    runner = web.ServerRunner(web.Server(server))
    await runner.setup()
    await web.TCPSite(runner, own_address(), 0).start()
    piece = make_slice("one", "system", "", runner.addresses[0][1], make_endpoint(own_address(), serving=True))
    piece["ports"][0]["name"] = ADMIN_PORT_NAME
    async with aiohttp.ClientSession() as session:
        gateways = Gateways(session, 60)
        gateways.set_slices([piece])
        await gateways.read()
        yield gateways
    await runner.cleanup()


def count_engine_reads(server: Server) -> Counter[str]:
    return Counter({service: number for (path, service), number in server.reads.items() if path == "/engines"})


async def test_engines_are_read_only_while_somebody_looks_and_figures_do_not_outlast_this(
    server: Server, gateways: Gateways, monkeypatch: pytest.MonkeyPatch
) -> None:
    await gateways.read_engines()
    assert not count_engine_reads(server)
    gateways.note_seen(NAMES[:1])
    for _ in range(5):
        await gateways.read_engines()
    figures = gateways.find_figures(NAMES[0])
    assert figures is not None
    assert figures.tokens_per_second == pytest.approx(100, rel=0.2)
    monkeypatch.setattr("conveyor_console.gateways._VIEWED_SECONDS", 0.0)
    await gateways.read_engines()
    assert gateways.find_figures(NAMES[0]) is None


async def test_services_that_somebody_sees_are_read_more_often_and_no_other_is_left_out(
    server: Server, gateways: Gateways
) -> None:
    seen = NAMES[50:75]
    for _ in range(10):
        gateways.note_seen(seen)
        await gateways.read_engines()
    reads = count_engine_reads(server)
    assert reads.total() == 250
    assert set(reads) == set(NAMES)
    assert min(reads[key] for key in seen) >= 2 * max(reads[key] for key in set(NAMES) - set(seen))


async def test_viewers_share_the_reads_of_steps_and_receipts(server: Server, gateways: Gateways) -> None:
    for _ in range(2):
        await asyncio.gather(
            *(gateways.read_steps(NAMES[0]) for _ in range(20)), *(gateways.read_slowest(NAMES[0]) for _ in range(20))
        )
    assert (server.reads["/steps", NAMES[0]], server.reads["/receipts", NAMES[0]]) == (1, 1)
