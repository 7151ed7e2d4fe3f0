"""Tests the tokens that engines report for requests.

They are in the log and the counters, and clients do not see them.
"""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, begin_stream, running_engine, running_raw_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_gateway.admission.ticket import Work
from conveyor_gateway.engines.exchange import EngineAnswer
from conveyor_gateway.relaying.work import find_work
from conveyor_gateway.usage import MAX_REPORT_BYTES

EVENTS = b"data: 1\n\ndata: [DONE]\n\n"
SO_FAR = '{"prompt_tokens":7,"cached_tokens":2,"completion_tokens":1}'
LAST = b'{"prompt_tokens":7,"cached_tokens":2,"completion_tokens":5}'
STREAM_HEAD = (
    f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nX-Engine-Usage: {SO_FAR}\r\nConnection: close\r\n\r\n"
).encode()


async def find_line(stack: Stack, request_id: str) -> dict[str, str]:
    """Return the values of the request's single log line. Waits for the line."""

    def lines() -> list[str]:
        return [each for each in stack.gateway.log if f" event=request id={request_id} " in each]

    await stack.wait(lambda: bool(lines()))
    (line,) = lines()
    return dict(pair.split("=", 1) for pair in line.split(" "))


def used(line: dict[str, str]) -> tuple[str, str, str]:
    return line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]


def counted(stack: Stack) -> list[float]:
    names = ("prompt_tokens_total", "cached_prompt_tokens_total", "generation_tokens_total", "uncounted_requests_total")
    return [stack.metric(name) for name in names]


async def test_a_whole_answer_s_report_is_logged_and_counted(stack: Stack, http: aiohttp.ClientSession) -> None:
    answer = answering(web.json_response, data={}, headers={"X-Engine-Usage": LAST.decode()})
    async with running_engine(answer) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as got:
            assert "X-Engine-Usage" not in got.headers
            line = await find_line(stack, got.headers["X-Request-Id"])
        assert used(line) == ("7", "2", "5")
        assert line["client"] == "127.0.0.1"
        assert 0 < float(line["engine_seconds"]) <= float(line["seconds"])
        assert counted(stack) == [7, 2, 5, 0]
        assert stack.metric("engine_seconds_total") > 0
        keys = [request.headers["X-Engine-Usage"] for request, _ in engine.requests]
        async with http.post(stack.completions, data=b"{}", headers={"X-Engine-Usage": keys[0]}):
            assert engine.requests[1][0].headers["X-Engine-Usage"] != keys[0], "each request has its own"


@pytest.mark.parametrize(
    "writes",
    [
        pytest.param([EVENTS + b"\x1e" + LAST], id="at once"),
        pytest.param([EVENTS, b"\x1e" + LAST], id="the report apart"),
        pytest.param([(EVENTS + b"\x1e" + LAST)[i : i + 1] for i in range(len(EVENTS + LAST) + 1)], id="byte by byte"),
    ],
)
async def test_a_stream_s_report_is_not_the_client_s(
    stack: Stack, http: aiohttp.ClientSession, writes: Sequence[bytes]
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in (STREAM_HEAD, *writes):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as got:
            assert await got.read() == EVENTS
        assert used(await find_line(stack, got.headers["X-Request-Id"])) == ("7", "2", "5")
        assert counted(stack) == [7, 2, 5, 0]


@pytest.mark.parametrize(
    "report", [b"", b"{}", b'{"prompt_tokens":-1,"cached_tokens":0,"completion_tokens":0}', b"[" * 200, b"x" * 100_000]
)
async def test_a_report_that_is_none_harms_no_stream(stack: Stack, http: aiohttp.ClientSession, report: bytes) -> None:
    assert len(b"[" * 200) < MAX_REPORT_BYTES

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD + EVENTS + b"\x1e" + report)
        await writer.drain()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as got:
            assert await got.read() == EVENTS
        assert used(await find_line(stack, got.headers["X-Request-Id"])) == ("7", "2", "1")


async def test_of_another_runtime_time_and_bytes_are_counted(stack: Stack, http: aiohttp.ClientSession) -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await begin_stream(request, b"data: \x1e\n\n", EVENTS)

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as got:
            assert await got.read() == b"data: \x1e\n\n" + EVENTS
        line = await find_line(stack, got.headers["X-Request-Id"])
        assert used(line) == ("-", "-", "-")
        assert float(line["engine_seconds"]) > 0
        assert stack.metric("uncounted_requests_total") == 1


@pytest.mark.parametrize("begins", [True, False], ids=["in its answer", "before its answer"])
async def test_the_usage_of_a_request_whose_client_left_is_read_from_the_engine(
    stack: Stack, http: aiohttp.ClientSession, begins: bool
) -> None:
    arrived, bodies = asyncio.Event(), asyncio.Queue[str]()

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/usage":
            bodies.put_nowait(request.query["key"])
            return web.Response(body=LAST)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream", "X-Engine-Usage": SO_FAR})
        if begins:
            await answer.prepare(request)
            await answer.write(EVENTS)
        arrived.set()
        await asyncio.sleep(600)
        return answer

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        task = asyncio.create_task(http.post(stack.completions, data=b"{}", headers={"X-Request-Id": f"left-{begins}"}))
        await arrived.wait()
        if begins:
            (await task).close()
        else:
            task.cancel()
        line = await find_line(stack, f"left-{begins}")
        assert (line["status"], line["reason"], *used(line)) == ("499", "client_gone", "7", "2", "5")
        assert bodies.get_nowait() == engine.requests[0][0].headers["X-Engine-Usage"]
        assert counted(stack) == [7, 2, 5, 0]


async def test_an_engine_that_dies_in_its_answer_leaves_what_it_said_first(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM_HEAD.replace(b"Connection: close", b"Transfer-Encoding: chunked") + b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as got:
            error = json.loads((await got.read()).split(b"\n\n")[1].removeprefix(b"data: "))
        assert error["error"]["code"] == "engine_broke"
        assert used(await find_line(stack, got.headers["X-Request-Id"])) == ("7", "2", "1")


async def test_tokens_are_counted_for_the_client_that_a_trusted_proxy_names(
    kubeconfig: Path, stack: Stack, http: aiohttp.ClientSession
) -> None:
    answer = answering(web.json_response, data={}, headers={"X-Engine-Usage": LAST.decode()})
    flags = ("--trusted-proxies=127.0.0.0/8", "--client-header=X-Client")
    async with running_engine(answer) as engine:
        await stack.add_engine(engine.port)
        with GatewayProcess(kubeconfig, *flags) as gateway:
            url = f"{gateway.url}/{stack.key}/v1/completions"
            for headers in ({"X-Client": "team-a"}, {"X-Client": "team-a"}, {}):
                async with http.post(url, data=b"{}", headers=headers) as got:
                    assert got.status == 200
            assert "X-Client" not in engine.requests[0][0].headers
            labels = {"namespace": stack.cluster.namespace, "inference_service": "qwen"}
            counted = gateway.metric(
                "conveyor_gateway_client_prompt_tokens_total", client="team-a", request_class="", owner="", **labels
            )
            assert (counted, gateway.metric("conveyor_gateway_prompt_tokens_total", **labels)) == (14, 21)
            assert [" client=team-a " in line for line in gateway.log if " event=request " in line] == [
                True,
                True,
                False,
            ]


@pytest.mark.parametrize("usage", ["oops", {"prompt_token_details": 0}, {"prompt_tokens": "1024"}, [[]], -1e999])
async def test_usage_of_another_type_in_an_answer_s_body_passes_and_harms_nobody(
    stack: Stack, http: aiohttp.ClientSession, usage: Any
) -> None:
    """Some routers parse the bodies of engines, and end with the first one that is not as expected."""
    await stack.apply_service()
    body = json.dumps({"object": "chat.completion", "choices": [], "usage": usage})
    async with running_engine(answering(web.Response, text=body, content_type="application/json")) as engine:
        await stack.add_engine(engine.port)
        for _ in range(2):
            async with http.post(stack.completions, json={"prompt": ""}) as answer:
                assert (answer.status, await answer.text()) == (200, body)


@pytest.mark.parametrize(("status", "expected"), [(200, Work(10, 3)), (400, Work(0)), (500, Work(0))])
async def test_an_error_of_a_runtime_that_reports_no_tokens_counts_as_no_tokens(
    http: aiohttp.ClientSession, status: int, expected: Work
) -> None:
    async with (
        running_engine(answering(web.json_response, data={}, status=status)) as engine,
        http.post(f"http://{own_address()}:{engine.port}/v1/completions", data=b"{}") as got,
    ):
        assert find_work(EngineAnswer(got), Work(10, 100), 12) == expected
