"""Tests how the operator asks gateways for an engine's warm-up, and invalid answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import Engine, answering, running_engine

from conveyor_kube.gateways import Gateway
from conveyor_operator.activity import warm_ups
from conveyor_operator.activity.warm_ups import WarmUps

QWEN = "default/qwen"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_ups, "_PAUSES_SECONDS", (0, 0.01, 0.01))


class Warming:
    """Requests warm-ups. Tests may change `gateways`. `events` has the results, and each service that was marked."""

    def __init__(self) -> None:
        self.gateways: list[Gateway] = []
        self.events: list[float | str | None] = []
        self.warm_ups = WarmUps(lambda: self.gateways, self.events.append)

    async def request(self, *pods: str, events: int) -> list[float | str | None]:
        """Run until there are this many events, and return them."""
        for pod in pods:
            self.warm_ups.request(QWEN, pod, self.events.append)
        async with asyncio.timeout(30):
            while len(self.events) < events:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.events


@pytest.fixture
async def warming() -> AsyncIterator[Warming]:
    gateways = Warming()
    running = asyncio.create_task(gateways.warm_ups.run())
    yield gateways
    assert not running.done()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


def at(server: Engine) -> Gateway:
    return Gateway(own_address(), server.port, serving=True)


async def test_a_gateway_is_queried_for_that_pod_and_its_service_is_marked_then(warming: Warming) -> None:
    async with running_engine(answering(web.json_response, data={"warm_up_seconds": 12.5})) as gateway:
        warming.gateways = [at(gateway)]
        assert await warming.request("uid-1", events=2) == [12.5, QWEN]
    ((request, _),) = gateway.requests
    assert (request.path, dict(request.query)) == ("/start", {"service": QWEN, "pod": "uid-1"})


async def test_an_engine_without_a_warm_up_is_queried_once_and_nothing_follows(warming: Warming) -> None:
    async with running_engine(answering(web.json_response, data={"warm_up_seconds": None})) as gateway:
        warming.gateways = [at(gateway)]
        assert await warming.request("uid-1", "uid-2", events=2) == [None, None]
    assert len(gateway.requests) == 2


async def test_a_gateway_that_does_not_know_the_engine_yet_is_queried_again(warming: Warming) -> None:
    async def answer_late(request: web.Request) -> web.StreamResponse:
        if len(gateway.requests) < 3:
            return web.json_response({"error": {"code": "no_engine"}}, status=503)
        return web.json_response({"warm_up_seconds": 3})

    async with running_engine(answer_late) as gateway:
        warming.gateways = [at(gateway)]
        assert await warming.request("uid-1", events=2) == [3.0, QWEN]


async def test_what_one_gateway_does_not_say_another_one_may(warming: Warming, monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        running_engine(answering(web.Response, status=500)) as bad,
        running_engine(answering(web.json_response, data={"warm_up_seconds": 3})) as good,
    ):
        turns = iter([at(bad), at(good)])
        monkeypatch.setattr("random.choice", lambda gateways: next(turns))
        warming.gateways = [at(bad), at(good)]
        assert await warming.request("uid-1", events=2) == [3.0, QWEN]


@pytest.mark.parametrize(
    "answer",
    [
        answering(web.json_response, data={"warm_up_seconds": -1}),
        answering(web.json_response, data={"warm_up_seconds": "long"}),
        answering(web.Response, text='{"warm_up_seconds": 1e400}'),
        answering(web.Response, text='{"warm_up_seconds": NaN}'),
        answering(web.json_response, data={}),
        answering(web.Response, text="[" * 200_000),
        answering(web.Response, text="x", status=404),
    ],
    ids=["negative", "word", "endless", "no number", "nothing", "nested", "no such page"],
)
async def test_an_invalid_page_reports_nothing_and_ends_nothing(
    warming: Warming, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> None:
    """The address may belong to another pod by now, and an older gateway has no such page."""
    async with running_engine(answer) as gateway:
        warming.gateways = [at(gateway)]
        assert await warming.request("uid-1", events=1) == [None]
    assert len(gateway.requests) == 3


async def test_without_a_gateway_nothing_is_reported(warming: Warming) -> None:
    assert await warming.request("uid-1", events=1) == [None]
