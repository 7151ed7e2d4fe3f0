"""Tests the figures of a real engine behind a real gateway, and its memory."""

import asyncio
import re

import aiohttp
from aiohttp import web
from tests.console.process import ConsoleProcess
from tests.contract.serving import serving
from tests.engine.processes import EngineServer
from tests.gateway.cluster import publish_gateway
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

MEASURED = {
    "First token or result, P95": r"[\d.]+ m?s",
    "Between tokens, P95": r"[\d.]+ m?s",
    "Tokens/s": r"[\d,.]+",
    "KV cache": r"\d+%",
}
BODY = {"prompt": "hello", "max_tokens": 500, "ignore_eos": True}


async def test_a_line_has_the_figures_of_gateway_and_engine(
    console: ConsoleProcess, engine: EngineServer, gateway: GatewayProcess, crd: Api, namespace: str, token: str
) -> None:
    async with serving(engine, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:

        async def complete() -> None:
            async with http.post(f"{gateway.url}/{service}/v1/completions", json=BODY) as answer:
                assert answer.status == 200
                await answer.read()

        def read() -> dict[str, str]:
            text = re.sub(r"<meter.*?</meter>|<small>.*?</small>", "", console.get("/", token).text)
            return {name: value.strip() for name, value in re.findall(r'data-label="([^"]+)">([^<]*)', text)}

        figures: dict[str, str] = {}
        async with asyncio.timeout(60):
            while not figures or "–" in (figures[name] for name in MEASURED):
                await asyncio.gather(*(complete() for _ in range(4)))
                figures = await asyncio.to_thread(read)
            requests = [asyncio.create_task(complete()) for _ in range(8)]
            while (busy := await asyncio.to_thread(read))["At engines"] == "0":
                pass
            await asyncio.gather(*requests)
    assert busy["Batches full"].endswith("%")
    assert all(re.fullmatch(pattern, figures[name]) for name, pattern in MEASURED.items()), figures
    assert "Some figures are missing" not in console.get("/", token).text


async def test_a_gateway_that_does_not_answer_is_said(
    console: ConsoleProcess, gateway: GatewayProcess, crd: Api, system_namespace: str, token: str
) -> None:
    publish_gateway(crd, system_namespace, "two", 9)
    await asyncio.to_thread(console.wait_for, "Some figures are missing: 1 of 2 gateways did not answer.", token)
    crd.delete(f"/apis/discovery.k8s.io/v1/namespaces/{system_namespace}/endpointslices/two")


async def test_a_page_of_a_gateway_that_is_no_text_ends_nothing(
    console: ConsoleProcess, gateway: GatewayProcess, crd: Api, system_namespace: str, token: str
) -> None:
    async def send(_request: web.Request) -> web.Response:
        return web.Response(body=b'{"services": {"\xff/x": {}}}')

    app = web.Application()
    app.router.add_get("/{page}", send)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "0.0.0.0", 0)
    await site.start()
    publish_gateway(crd, system_namespace, "hostile", runner.addresses[0][1])
    await asyncio.to_thread(console.wait_for, "Some figures are missing: 1 of 2 gateways did not answer.", token)
    crd.delete(f"/apis/discovery.k8s.io/v1/namespaces/{system_namespace}/endpointslices/hostile")
    await runner.cleanup()
