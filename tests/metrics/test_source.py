"""Tests the sum over the gateways. It needs a current report of each gateway; otherwise there is no value."""

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import refusing_address, silent_address

from conveyor_http.server import open_port
from conveyor_kube.gateways import Gateway
from conveyor_kube.watch import MAX_SILENCE_SECONDS, WatchState
from conveyor_metrics.errors import NotFound, NotKnown
from conveyor_metrics.source import GatewaySource
from conveyor_process.listening import close_port

Json = dict[str, Any]
Start = Callable[[Callable[[], web.StreamResponse]], Awaitable[Gateway]]
Address = Callable[[], AbstractContextManager[tuple[str, int]]]

NOT_SYNCED = {"error": {"message": "not synced: endpointslices", "code": "not_synced"}}


def build_demand(in_flight: int, queue_depth: int, name: str = "default/qwen") -> Json:
    more = {"queued": in_flight, "dispatched": 0}
    return {"services": {name: {"in_flight": in_flight, "queue_depth": queue_depth, **more}}}


@pytest.fixture
def queried() -> list[str]:
    """The services for which gateways were queried."""
    return []


@pytest.fixture
async def start(queried: list[str]) -> AsyncIterator[Start]:
    runners, accepting = [], []

    async def begin(answer: Callable[[], web.StreamResponse]) -> Gateway:
        async def handle(request: web.Request) -> web.StreamResponse:
            queried.append(request.query["service"])
            return answer()

        app = web.Application()
        app.router.add_get("/demand", handle)
        runner = web.AppRunner(app)
        await runner.setup()
        accepting.append(open_port(runner, "127.0.0.1", 0))
        runners.append(runner)
        return Gateway("127.0.0.1", accepting[-1].port, serving=True)

    yield begin
    for port, runner in zip(accepting, runners, strict=True):
        await close_port(port)
        await runner.cleanup()


@pytest.fixture
def watch() -> WatchState:
    return WatchState("endpointslices/conveyor-system", synced=True, received_at=time.monotonic())


@pytest.fixture
async def source(request: pytest.FixtureRequest, watch: WatchState) -> AsyncIterator[GatewaySource]:
    """The source under test. Its timeout is long, for slow machines, except in tests that wait for the timeout."""
    async with aiohttp.ClientSession() as session:
        yield GatewaySource(session, getattr(request, "param", 20), watch)


SOON = pytest.mark.parametrize("source", [1], indirect=True, ids=["soon"])


async def test_the_value_is_the_sum_of_all_gateways(start: Start, source: GatewaySource) -> None:
    source.gateways = (
        await start(lambda: web.json_response(build_demand(3, 1))),
        await start(lambda: web.json_response(build_demand(4, 2))),
        await start(lambda: web.json_response(build_demand(9, 9, name="default/other"))),
    )
    demand = await source.read_demand("default/qwen")
    assert (demand.in_flight, demand.queue_depth) == (7, 3)


async def test_every_query_reads_the_gateways_again_and_for_one_service(
    start: Start, source: GatewaySource, queried: list[str]
) -> None:
    values = iter([1, 5])
    source.gateways = (await start(lambda: web.json_response(build_demand(next(values), 0))),)
    assert [(await source.read_demand("default/qwen")).in_flight for _ in range(2)] == [1, 5]
    assert queried == ["default/qwen"] * 2


async def test_a_service_that_no_gateway_knows_does_not_exist(start: Start, source: GatewaySource) -> None:
    source.gateways = (await start(lambda: web.json_response(build_demand(1, 1))),)
    with pytest.raises(NotFound, match="no gateway knows an InferenceService default/other"):
        await source.read_demand("default/other")


@pytest.mark.parametrize("gateways", [None, ()], ids=["not listed yet", "none"])
async def test_without_a_gateway_nothing_is_known(source: GatewaySource, gateways: tuple[Gateway, ...] | None) -> None:
    source.gateways = gateways
    with pytest.raises(NotKnown, match="no gateway is known"):
        await source.read_demand("default/qwen")


async def test_a_list_of_gateways_that_may_be_old_makes_the_sum_unknown_until_the_next_event(
    start: Start, source: GatewaySource, watch: WatchState, caplog: pytest.LogCaptureFixture
) -> None:
    source.gateways = (await start(lambda: web.json_response(build_demand(3, 1))),)
    watch.received_at -= MAX_SILENCE_SECONDS + 1
    for _ in range(2):
        with pytest.raises(NotKnown, match="endpointslices/conveyor-system: no data from the API server for 1"):
            await source.read_demand("default/qwen")
    assert caplog.text.count("event=stale ") == 1
    watch.received_at = time.monotonic()
    assert (await source.read_demand("default/qwen")).in_flight == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: web.json_response({"services": {}}, status=503), "answers 503"),
        (lambda: web.json_response({}), "services"),
        (lambda: web.json_response(build_demand(-1, 0)), ">= 0"),
        (lambda: web.Response(text="<html>"), "JSON"),
        (lambda: web.Response(text=json.dumps(build_demand(1, 0)) + " " * (1 << 20)), "more than 1048576 bytes"),
        (lambda: web.Response(status=302, headers={"Location": "http://127.0.0.1:1/"}), "answers 302"),
    ],
)
async def test_one_gateway_that_cannot_be_read_makes_the_sum_unknown(
    start: Start, source: GatewaySource, answer: Callable[[], web.StreamResponse], reason: str
) -> None:
    source.gateways = (await start(lambda: web.json_response(build_demand(3, 1))), await start(answer))
    with pytest.raises(NotKnown, match=reason):
        await source.read_demand("default/qwen")


async def test_a_caller_that_accepts_a_partial_sum_gets_it(start: Start, source: GatewaySource) -> None:
    source.gateways = (
        await start(lambda: web.json_response(build_demand(3, 1))),
        await start(lambda: web.json_response(build_demand(4, 2))),
        await start(lambda: web.json_response({}, status=503)),
    )
    demand = await source.read_demand("default/qwen", of_readable=True)
    assert (demand.in_flight, demand.queue_depth) == (7, 3)
    with pytest.raises(NotKnown, match="one does not answer"):
        await source.read_demand("default/qwen")
    with pytest.raises(NotKnown, match="one does not answer"):  # it may be the one that knows the service
        await source.read_demand("default/other", of_readable=True)


@pytest.mark.parametrize("of_readable", [False, True])
async def test_gateways_of_which_none_can_be_read_have_no_sum(
    start: Start, source: GatewaySource, of_readable: bool
) -> None:
    source.gateways = (await start(lambda: web.json_response({}, status=503)),)
    with pytest.raises(NotKnown, match="one does not answer"):
        await source.read_demand("default/qwen", of_readable)


async def test_an_outage_is_logged_once_and_again_after_a_recovery(
    start: Start, source: GatewaySource, caplog: pytest.LogCaptureFixture
) -> None:
    answers = iter([503, 503, 200, 503])
    source.gateways = (await start(lambda: web.json_response(build_demand(3, 1), status=next(answers))),)
    for _ in range(4):
        with contextlib.suppress(NotKnown):
            await source.read_demand("default/qwen")
    assert caplog.text.count("event=gateway_unreadable") == 2


@SOON
@pytest.mark.parametrize("serving", [True, False], ids=["serving", "not serving: it may be draining"])
async def test_a_gateway_that_hangs_makes_the_sum_unknown_in_time(source: GatewaySource, serving: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as never_accepting:
        host, port = never_accepting.getsockname()
        source.gateways = (Gateway(host, port, serving),)
        with pytest.raises(NotKnown, match=r"does not answer within 1 s"):
            await source.read_demand("default/qwen")


ABSENT = pytest.mark.parametrize("absent", [refusing_address, silent_address])


@SOON
@ABSENT
async def test_a_serving_gateway_that_takes_no_connection_makes_the_sum_unknown(
    start: Start, source: GatewaySource, absent: Address
) -> None:
    begun = await start(lambda: web.json_response(build_demand(3, 1)))
    with absent() as (host, port):
        source.gateways = (begun, Gateway(host, port, serving=True))
        with pytest.raises(NotKnown, match="one does not answer"):
            await source.read_demand("default/qwen")


@SOON
@ABSENT
async def test_a_gateway_that_is_not_there_and_not_serving_holds_nothing(
    start: Start, source: GatewaySource, absent: Address
) -> None:
    begun = await start(lambda: web.json_response(build_demand(3, 1)))
    with absent() as (host, port):
        source.gateways = (begun, Gateway(host, port, serving=False))
        assert (await source.read_demand("default/qwen")).in_flight == 3


@SOON
@pytest.mark.parametrize("turns", range(1, 6))
async def test_a_metrics_server_that_is_late_itself_does_not_take_a_draining_gateway_for_absent(
    start: Start, source: GatewaySource, turns: int
) -> None:
    new, draining = [await start(lambda count=count: web.json_response(build_demand(count, 0))) for count in (0, 4)]
    source.gateways = (new,)
    assert (await source.read_demand("default/qwen")).in_flight == 0, "there is a connection to this one"
    source.gateways = (new, replace(draining, serving=False))
    reading = asyncio.create_task(source.read_demand("default/qwen"))
    for _ in range(turns):
        await asyncio.sleep(0)
    time.sleep(0.6)  # noqa: ASYNC251  the processor was busy elsewhere while the connections were made
    with contextlib.suppress(NotKnown):
        assert (await reading).in_flight == 4


async def test_a_gateway_that_has_never_synced_holds_nothing(start: Start, source: GatewaySource) -> None:
    begun = await start(lambda: web.json_response(build_demand(3, 1)))
    source.gateways = (begun, await start(lambda: web.json_response(NOT_SYNCED, status=503)))
    assert (await source.read_demand("default/qwen")).in_flight == 3


async def test_gateways_of_which_none_can_say_anything_make_the_sum_unknown(
    start: Start, source: GatewaySource
) -> None:
    unsynced = await start(lambda: web.json_response(NOT_SYNCED, status=503))
    with refusing_address() as (host, port):
        source.gateways = (unsynced, Gateway(host, port, serving=False))
        with pytest.raises(NotKnown, match="no reachable gateway"):
            await source.read_demand("default/qwen")
