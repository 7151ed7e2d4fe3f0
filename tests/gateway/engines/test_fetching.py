"""Tests the reading of engines' small pages, including pages that are too large, too late or malformed."""

import asyncio
import ssl
from pathlib import Path

import pytest
from aiohttp import web
from tests.gateway.builders import make_hold
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, refusing_address, running_engine

from conveyor_gateway.engines import fetching
from conveyor_gateway.engines.fetching import EnginePage, fetch, fetch_loads
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.engines.transport import EngineTls, Transport
from conveyor_protocol.engine_pages import ReportedLoad
from conveyor_protocol.request_headers import CHALLENGE_HEADER, ENGINE_CHALLENGE
from e2e.cluster.certificates import Authority


async def test_every_engine_is_queried_at_once_and_a_silent_one_counts_as_none() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(3600)
        raise AssertionError

    with refusing_address() as (host, port):
        async with (
            running_engine(never) as slow,
            running_engine(answering(web.json_response, data={"waiting": 3, "carried": 8})) as good,
        ):
            gone = f"{host}:{port}"
            addresses = [f"{own_address()}:{engine.port}" for engine in (slow, good)]
            state = {
                gone: ReportedLoad(),
                addresses[0]: ReportedLoad(),
                addresses[1]: ReportedLoad(waiting=3, carried=8),
            }
            assert await fetch_loads(make_hold(), [gone, *addresses], 1) == state
    assert await fetch_loads(make_hold(), [], 1) == {}


async def test_pages_and_requests_over_tls_share_connections(tmp_path: Path) -> None:
    authority, peers = Authority(tmp_path, "ca"), list[object]()
    pair = authority.issue("engine", "engine", names=["qwen-engine.default.svc"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(pair.certificate, pair.key)

    async def answer(request: web.BaseRequest) -> web.Response:
        peers.append(request.get_extra_info("peername"))
        return web.json_response({"waiting": 3})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, own_address(), 0, ssl_context=context)
    await site.start()
    address, transport = f"{own_address()}:{runner.addresses[0][1]}", Transport(EngineTls(authority.certificate))
    session = EngineSession(transport)
    for _ in range(3):
        assert await fetch_loads(make_hold(), [address], 5, transport) == {address: ReportedLoad(waiting=3)}
    await session.give_place_back(make_hold(), address)
    await session.close()
    await runner.cleanup()
    assert len(peers) == 4
    assert len(set(peers)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"waiting":-1}',
        '{"waiting":"3"}',
        '{"waiting":1e400}',
        '{"carried":0}',
        '{"limit_reason":3}',
        '{"limit_reason":"No reason."}',
        '{"warm_up_seconds":-1}',
        '{"warm_up_seconds":"3"}',
        '{"warm_up_seconds":1e400}',
        '{"warm_up_seconds":NaN}',
        "x" * 100_000,
        "[" * 60_000,
    ],
)
async def test_nonsense_is_no_number(text: str) -> None:
    async with running_engine(answering(web.Response, text=text)) as engine:
        address = f"{own_address()}:{engine.port}"
        assert await fetch_loads(make_hold(), [address], 5) == {address: ReportedLoad()}


async def test_a_challenge_that_cannot_be_answered_is_no_page() -> None:
    async with running_engine(
        answering(web.Response, status=401, headers={CHALLENGE_HEADER: ENGINE_CHALLENGE}, text="{}")
    ) as engine:
        address = f"{own_address()}:{engine.port}"
        assert await fetch(make_hold(), [address], "/v2/models/qwen", 5) == {address: None}


async def test_a_page_comes_as_it_is_and_leads_nowhere_else() -> None:
    moved = {"status": 302, "headers": {"Location": "http://127.0.0.1:9/"}, "text": "moved"}
    async with running_engine(answering(web.Response, **moved)) as engine:
        address = f"{own_address()}:{engine.port}"
        assert await fetch(make_hold(), [address], "/health", 5) == {
            address: EnginePage(302, "text/plain; charset=utf-8", b"moved")
        }


@pytest.mark.parametrize(("seconds", "all_come"), [(60.0, True), (0.2, False)])
async def test_of_thousands_of_engines_some_are_queried_at_a_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float, all_come: bool
) -> None:
    now, most = 0, 0

    async def count(*arguments: object) -> EnginePage:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0 if all_come else 10)
        now -= 1
        return EnginePage(200, "", b"")

    monkeypatch.setattr(fetching, "_fetch", count)
    addresses = [f"10.0.{number // 250}.{number % 250}:80" for number in range(3_000)]
    pages = await fetch(make_hold(), addresses, "/load", seconds)
    assert list(pages) == addresses
    assert all(page is not None for page in pages.values()) is all_come
    assert most == 100
