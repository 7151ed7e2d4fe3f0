"""Tests who reports that requests are answered: the gateway at its root, and an engine for its service."""

import asyncio

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import SlowEngine, answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get

from conveyor_gateway import __version__


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_the_root_says_of_the_gateway_that_it_answers_and_which_it_is(
    gateway: GatewayProcess, http: aiohttp.ClientSession, base: str
) -> None:
    for page in ("health", "ping"):
        assert await get(http, f"{gateway.url}{base}/{page}") == (200, {"status": "ready"})
    assert await get(http, f"{gateway.url}{base}/version") == (200, {"version": __version__})


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_a_service_says_by_one_of_its_engines_that_it_answers(
    stack: Stack, http: aiohttp.ClientSession, base: str
) -> None:
    url = f"{stack.gateway.url}/{stack.key}{base}"
    assert (await get(http, f"{url}/health"))[1]["error"]["code"] == "no_engine"
    assert await get(http, f"{url}/version") == (200, {"version": __version__})
    async with (
        running_engine(answering(web.json_response, data={"status": "draining"}, status=503)) as leaving,
        running_engine(answering(web.json_response, data={"from": "the engine"})) as engine,
    ):
        await stack.add_engine(leaving.port)
        status, body = await get(http, f"{url}/health")
        assert (status, body["error"]["code"]) == (503, "engines_not_ready")
        await stack.add_engine(engine.port)
        for page in ("health", "ping", "version"):
            assert await get(http, f"{url}/{page}") == (200, {"from": "the engine"})
        async with http.get(
            f"{stack.gateway.url}{base}/health", headers={"Host": f"qwen.{stack.cluster.namespace}"}
        ) as a:
            assert await a.json() == {"from": "the engine"}
    assert {request.path for request, _ in engine.requests} == {"/health", "/ping", "/version"}
    assert stack.demand()["in_flight"] == 0


async def test_an_engine_s_page_is_data_and_runs_in_no_browser(stack: Stack, http: aiohttp.ClientSession) -> None:
    page = answering(web.Response, text="<script>alert(1)</script>", content_type="text/html")
    async with running_engine(page) as engine:
        await stack.add_engine(engine.port)
        async with http.get(f"{stack.gateway.url}/{stack.key}/health") as answer:
            assert answer.headers["Content-Type"] == "application/octet-stream"
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert "sandbox" in answer.headers["Content-Security-Policy"]


async def test_many_clients_that_check_a_service_cause_one_query_of_its_engine(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        requests = [asyncio.create_task(get(http, f"{stack.gateway.url}/{stack.key}/health")) for _ in range(30)]
        await stack.wait(lambda: slow.running > 0)
        slow.gate.set()
        assert {status for status, _ in await asyncio.gather(*requests)} == {200}
    assert slow.most_running == 1
