"""Tests which pages' scripts may read answers: headers of all answers, streams and errors, and preflight requests."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.process import GatewayProcess

from conveyor_gateway.listening.cors import Cors
from conveyor_gateway.listening.listener import Listener

PAGE, OTHER = "https://chat.example.com", "https://evil.example.com"
ALLOW = "Access-Control-Allow-Origin"


@contextlib.asynccontextmanager
async def listening(*origins: str) -> AsyncIterator[str]:
    """Open a port that streams an answer. Yields its URL."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(b"data: 1\n\n")
        return answer

    opened = Listener(handle, "127.0.0.1", 0, 10, Cors(frozenset(origins)))
    await opened.open()
    try:
        yield f"http://127.0.0.1:{opened.port}/"
    finally:
        await opened.close()


@pytest.mark.parametrize(
    ("origins", "origin", "allowed", "vary"),
    [
        ((), PAGE, None, None),
        ((PAGE,), PAGE, PAGE, "Origin"),
        ((PAGE, "http://localhost:3000"), "http://localhost:3000", "http://localhost:3000", "Origin"),
        ((PAGE,), OTHER, None, "Origin"),
        ((PAGE,), f"{PAGE}.evil.com", None, "Origin"),
        ((PAGE,), "null", None, "Origin"),
        (("*",), OTHER, "*", None),
    ],
)
async def test_a_stream_may_be_read_by_pages_of_allowed_origins_alone(
    http: aiohttp.ClientSession, origins: tuple[str, ...], origin: str, allowed: str | None, vary: str | None
) -> None:
    async with listening(*origins) as url, http.get(url, headers={"Origin": origin}) as answer:
        assert (answer.headers.get(ALLOW), answer.headers.get("Vary")) == (allowed, vary)
        assert "Access-Control-Allow-Credentials" not in answer.headers
        exposed = answer.headers.get("Access-Control-Expose-Headers")
        assert exposed == ("X-Request-Id, Retry-After, Inference-Header-Content-Length" if allowed else None)


async def test_a_gateway_answers_preflight_requests_of_browsers(
    crd: object, kubeconfig: Path, http: aiohttp.ClientSession, gateway: GatewayProcess
) -> None:
    headers = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with GatewayProcess(kubeconfig, f"--allowed-origins={PAGE}") as allowing:
        async with http.options(f"{allowing.url}/v1/chat/completions", headers=headers) as answer:
            assert (answer.status, answer.headers[ALLOW]) == (204, PAGE)
            assert answer.headers["Access-Control-Allow-Methods"] == "GET, POST"
            assert "authorization" in answer.headers["Access-Control-Allow-Headers"]
        async with http.get(f"{allowing.url}/v1/nothing", headers={"Origin": PAGE}) as answer:
            assert (answer.status, answer.headers[ALLOW]) == (404, PAGE), "a page reads the error's words"
        async with http.options(f"{allowing.url}/v1/models", headers={"Origin": PAGE}) as answer:
            assert answer.status == 405, "no preflight"
        async with http.options(f"{allowing.url}/v1/models", headers=headers | {"Origin": OTHER}) as answer:
            assert ALLOW not in answer.headers
    async with http.options(f"{gateway.url}/v1/chat/completions", headers=headers) as answer:
        assert (answer.status, answer.headers.get(ALLOW)) == (405, None), "by default no page may"
