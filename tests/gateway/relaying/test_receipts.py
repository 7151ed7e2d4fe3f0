"""Tests that the gateway passes a request for a receipt on to engines, and keeps the receipts that it gets."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.stack import Stack

from conveyor_protocol.request_headers import ReceiptRequest, parse_receipt_request, write_receipt_request

TIMES = [41.25, 3.5, 20.0, 5.0, 30.0, 60.0, 2.5, 1, "window"]
USED = {"prompt_tokens": 7, "cached_tokens": 2, "completion_tokens": 5}
LAST = json.dumps(USED | {"receipt": TIMES})


async def fetch(stack: Stack, http: aiohttp.ClientSession, request_id: str) -> tuple[int, Any]:
    url = f"http://127.0.0.1:{stack.gateway.admin_port}/receipt"
    async with http.get(url, params={"id": request_id}) as answer:
        return answer.status, await answer.json()


async def post(stack: Stack, http: aiohttp.ClientSession, **headers: str) -> aiohttp.ClientResponse:
    async with http.post(stack.completions, data=b"{}", headers=headers) as got:
        await got.read()
        return got


async def test_the_gateway_keeps_the_receipt_of_a_request(stack: Stack, http: aiohttp.ClientSession) -> None:
    answer = answering(web.json_response, data={}, headers={"X-Engine-Usage": LAST})
    async with running_engine(answer) as engine:
        await stack.add_engine(engine.port)
        await post(stack, http, **{"X-Request-Id": "mine"})
        status, receipts = await fetch(stack, http, "mine")
    assert (status, len(receipts)) == (200, 1)
    receipt = receipts[0]
    assert receipt["used"] == USED | {"receipt": TIMES}
    assert (receipt["service"], receipt["status"], receipt["attempts"]) == (stack.key, 200, 1)
    assert receipt["gateway"] == socket.gethostname()
    assert receipt["engine"].endswith(f":{engine.port}")
    assert 0 < receipt["engine_seconds"] <= receipt["seconds"]


async def test_a_request_that_no_gateway_knows_has_no_receipt(stack: Stack, http: aiohttp.ClientSession) -> None:
    status, body = await fetch(stack, http, "nobody's")
    assert (status, body["error"]["code"]) == (404, "receipt_not_found")


async def test_an_answer_that_its_engine_has_not_ended_is_asked_for_again(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    asked = []

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/usage":
            asked.append(request.query["key"])
            return web.Response(body=LAST)
        return web.json_response({}, headers={"X-Engine-Usage": json.dumps(USED | {"is_final": False})})

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        await post(stack, http, **{"X-Request-Id": "stopped"})

        def is_recorded() -> bool:
            return any(" event=request id=stopped " in line for line in stack.gateway.log)

        await stack.wait(is_recorded)
        _, (receipt,) = await fetch(stack, http, "stopped")
        assert asked == [engine.requests[0][0].headers["X-Engine-Usage"]]
    assert receipt["used"]["receipt"] == TIMES


async def test_a_request_for_a_receipt_reaches_the_engine_with_the_time_in_the_queue(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    answer = answering(web.json_response, data={}, headers={"X-Receipt": '{"engine_ms":1}'})
    async with running_engine(answer) as engine:
        await stack.add_engine(engine.port)
        got = await post(stack, http, **{"X-Receipt": "TRUE"})
        assert got.headers["X-Receipt"] == '{"engine_ms":1}', "of an answer without a usage"
        for value in ("", "false", "true; gateway=me"):
            await post(stack, http, **{"X-Receipt": value})
        await post(stack, http)
    header, *others = [request.headers.get("X-Receipt") for request, _ in engine.requests]
    asked = parse_receipt_request(header or "")
    assert asked is not None
    assert asked.gateway == socket.gethostname()
    assert 0 <= asked.queue_ms < 60_000
    assert others == [None] * 4, "what a client writes is not passed on"


async def test_the_page_s_request_gets_a_receipt(stack: Stack) -> None:
    page = (Path(__file__).parents[3] / "docs/receipts.md").read_text()
    command = page.partition("```sh\n")[2].partition("```")[0]
    url = "http://localhost:8080/team-b/chat/v1/completions"
    assert url in command
    async with running_engine(answering(web.json_response, data={"usage": {}})) as engine:
        await stack.add_engine(engine.port)
        process = await asyncio.create_subprocess_shell(
            command.replace(url, stack.completions), stdout=asyncio.subprocess.PIPE
        )
        assert (await process.communicate())[0] == b'{"usage": {}}'
        asked = parse_receipt_request(engine.requests[0][0].headers["X-Receipt"])
    assert asked is not None
    assert asked.gateway


@pytest.mark.parametrize("text", ["", "false", "1", "true;", "true; gateway=a b; queue_ms=1.0", "true; queue_ms=1.0"])
def test_other_values_request_no_receipt(text: str) -> None:
    assert parse_receipt_request(text) is None


def test_the_header_survives_the_way_to_the_engine() -> None:
    assert parse_receipt_request(write_receipt_request("gateway-7d.x", 0.25)) == ReceiptRequest("gateway-7d.x", 250.0)
    assert parse_receipt_request("True") == ReceiptRequest()
