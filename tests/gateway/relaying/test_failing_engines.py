"""Tests engines that refuse, end, hang or answer with malformed HTTP, through a whole gateway."""

import asyncio
import json
import time

import aiohttp
import pytest
from aiohttp import web
from openai import APIError, AsyncOpenAI
from openai.types.responses import ResponseErrorEvent
from tests.gateway.engine_servers import (
    Talk,
    answering,
    begin_stream,
    drop_all_that_arrives,
    running_engine,
    running_raw_engine,
)
from tests.gateway.stack import Stack, post

from conveyor_gateway.admission.engine_pool import LEFT_OUT_SECONDS
from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.responses import build_error_event


@pytest.mark.parametrize("status", [429, 503])
async def test_an_engine_that_refuses_is_left_out_and_another_one_answers(
    stack: Stack, http: aiohttp.ClientSession, status: int
) -> None:
    refuse, take = answering(web.Response, status=status), answering(web.json_response, data={"from": "the other"})
    async with running_engine(refuse) as refusing, running_engine(take) as other:
        await stack.add_engine(refusing.port)
        await stack.add_engine(other.port)
        for _ in range(8):
            assert (await post(http, stack.completions, b'{"n": 1}'))[:2] == (200, {"from": "the other"})
    assert 1 <= len(refusing.requests) < 8
    assert {body for _, body in refusing.requests + other.requests} == {b'{"n": 1}'}
    assert stack.metric("retries_total", reason="refused") == len(refusing.requests)


async def test_an_engine_that_is_full_for_one_large_request_serves_the_small_ones_meanwhile(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    has_room = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        is_large = b'"n"' in await request.read()
        return web.json_response({}, status=429 if is_large and not has_room.is_set() else 200)

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        task = asyncio.create_task(post(http, stack.completions, b'{"n": 64}'))
        await stack.wait_demand(queued=1)
        for _ in range(20):
            assert (await post(http, stack.completions))[0] == 200
        assert stack.metric("queue_wait_seconds_count") == 20
        assert stack.metric("queue_wait_seconds_sum") == 0  # not one had to wait for the engine
        has_room.set()
        assert (await task)[0] == 200


async def test_a_refusal_without_end_is_not_read_to_its_end(stack: Stack, http: aiohttp.ClientSession) -> None:
    sent_bytes = 0

    async def refuse(request: web.Request) -> web.StreamResponse:
        nonlocal sent_bytes
        answer = web.StreamResponse(status=503)
        await answer.prepare(request)
        while sent_bytes < 100 << 20:
            await answer.write(b"x" * (1 << 20))
            sent_bytes += 1 << 20
        return answer

    async with (
        running_engine(refuse) as refusing,
        running_engine(answering(web.json_response, data={"from": "the other"})) as other,
    ):
        await stack.add_engine(refusing.port)
        await stack.add_engine(other.port)
        begun = time.monotonic()
        for _ in range(2):
            assert (await post(http, stack.completions))[:2] == (200, {"from": "the other"})
        num_pauses = int((time.monotonic() - begun) / LEFT_OUT_SECONDS)  # none, unless the machine stands still
    assert 1 <= len(refusing.requests) <= 1 + num_pauses
    assert sent_bytes < 50 << 20


async def test_an_only_engine_that_refuses_is_tried_again_until_it_takes_the_request(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    statuses = [503, 429, 200]

    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({}, status=statuses.pop(0))

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        assert (await post(http, stack.completions))[0] == 200
    assert len(engine.requests) == 3


async def test_an_address_where_nobody_listens_costs_a_retry_and_no_error(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async with running_engine(answering(web.json_response, data={})) as engine:
        async with running_engine(answering(web.Response)) as gone:
            pass
        await stack.set_engine_ready(gone.port, True)
        await stack.add_engine(engine.port)
        for _ in range(4):
            assert (await post(http, stack.completions))[0] == 200


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


DEAD = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n{}"  # from a server whose engine process has died


async def send_dead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(DEAD)
    await writer.drain()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_request_whose_engine_dies_before_the_first_byte_is_sent_again(
    stack: Stack, http: aiohttp.ClientSession, begun: bool
) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    answers = [head if begun else DEAD, head + b"9\r\ndata: 1\n\n\r\n0\r\n\r\n"]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0))
        await writer.drain()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert (answer.status, await answer.read()) == (200, b"data: 1\n\n")
    assert stack.metric("retries_total", reason="lost") == 1


@pytest.mark.parametrize("die", [break_off, send_dead])
async def test_a_request_that_kills_engines_kills_two_of_them_at_most(
    stack: Stack, http: aiohttp.ClientSession, die: Talk
) -> None:
    async with running_raw_engine(die) as port:
        await stack.add_engine(port)
        status, body, _ = await post(http, stack.completions)
    assert (status, body["error"]["code"]) == (502, "engine_lost")
    assert stack.metric("retries_total", reason="lost") == 1
    await stack.wait_demand(in_flight=0)


async def test_a_form_that_was_at_two_dying_engines_is_not_sent_again(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    deadly = b'{"prompt": "a", "structured_outputs": {"grammar": "start: deadly"}}'
    async with running_raw_engine(break_off) as port:
        await stack.add_engine(port)
        for code in ("engine_lost", "engine_lost", "ends_engines"):
            status, body, _ = await post(http, stack.completions, deadly)
            assert (status, body["error"]["code"]) == (502, code)


async def test_equal_requests_with_a_form_at_one_dying_engine_are_one_death(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    body = b'{"prompt": "a", "structured_outputs": {"grammar": "start: equal"}}'
    both = asyncio.Barrier(2)

    async def die_with_both(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await both.wait()
        writer.transport.abort()

    async with running_raw_engine(die_with_both) as port:
        await stack.add_engine(port)
        answers = await asyncio.gather(*(post(http, stack.completions, body) for _ in range(2)))
        await stack.set_engine_ready(port, False)
    assert [answer["error"]["code"] for _, answer, _ in answers] == ["engine_lost", "engine_lost"]
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        assert (await post(http, stack.completions, body))[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "a", "structured_outputs": {"grammar": "start: r1"}}',
        b'{"prompt": "a", "response_format": {"type": "json_object"}}',
        rb'{"prompt": "a", "\u0072esponse_\u0066ormat": {"type": "json_object"}}',
        b'{"messages": [], "tools": [], "tool_choice": "required"}',
    ],
)
async def test_a_request_with_a_form_whose_engine_dies_is_not_sent_to_another(
    stack: Stack, http: aiohttp.ClientSession, body: bytes
) -> None:
    async with running_raw_engine(break_off) as port:
        await stack.add_engine(port)
        status, answer, _ = await post(http, stack.completions, body)
    assert (status, answer["error"]["code"]) == (502, "engine_lost")
    assert stack.metric("retries_total", reason="lost") == 0


@pytest.mark.slow  # half a minute, after which the gateway gives the connection up
async def test_a_request_with_a_form_at_a_lost_node_is_sent_to_another_engine(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    body = b'{"prompt": "a", "structured_outputs": {"grammar": "start: lost"}}'
    is_lost = asyncio.Event()

    async def be_lost(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        drop_all_that_arrives(writer)
        is_lost.set()
        await asyncio.Event().wait()

    async with running_raw_engine(be_lost) as port:
        await stack.add_engine(port)
        request = asyncio.create_task(post(http, stack.completions, body))
        await is_lost.wait()
        async with running_engine(answering(web.json_response, data={"from": "another"})) as another:
            await stack.add_engine(another.port)
            assert (await request)[:2] == (200, {"from": "another"})
            await stack.set_engine_ready(port, False)
            await stack.set_engine_ready(another.port, False)
    assert stack.metric("retries_total", reason="lost") == 1
    async with running_raw_engine(break_off) as port:  # the lost node counts as an engine that died with the body
        await stack.add_engine(port)
        codes = [(await post(http, stack.completions, body))[1]["error"]["code"] for _ in range(2)]
    assert codes == ["engine_lost", "ends_engines"]


async def test_openai_s_client_raises_a_server_error_for_a_stream_of_responses_that_breaks(stack: Stack) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, b'event: x\ndata: {"type": "response.in_progress"}\n\n')
        assert request.transport is not None
        request.transport.abort()
        return answer

    async with running_engine(die) as engine, AsyncOpenAI(base_url=stack.url, api_key="-", max_retries=0) as client:
        await stack.add_engine(engine.port)
        stream = await client.responses.create(model="qwen", input="a", stream=True)
        with pytest.raises(APIError) as caught:
            async for _ in stream:
                pass
    assert (caught.value.type, caught.value.code) == ("server_error", "engine_broke")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/v1/chat/completions"])
def test_the_event_of_an_error_has_the_form_of_its_api(path: str) -> None:
    *name, data = build_error_event(GatewayError("broke", Code.ENGINE_BROKE), path).decode().splitlines()[:-1]
    event = json.loads(data.removeprefix("data: "))
    kind, code = event["error"]["type"], event["error"]["code"]
    match path:
        case "/v1/responses":
            assert name == ["event: error"]
            ResponseErrorEvent.model_validate(event)
            assert (event["type"], event["code"], kind) == ("error", "engine_broke", "server_error")
        case "/v1/messages":
            assert (name, event["type"], kind, code) == (["event: error"], "error", "api_error", "engine_broke")
        case _:
            assert (name, event.keys(), kind, code) == ([], {"error"}, "server_error", "engine_broke")


@pytest.mark.parametrize(("sent", "glue"), [(b"data: 1\n\n", b""), (b"data: 1\n\ndata: {", b"\n\n")])
async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_error_event(
    stack: Stack, http: aiohttp.ClientSession, sent: bytes, glue: bytes
) -> None:
    num_requests = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        num_requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"%x\r\n%s\r\n" % (len(sent), sent))
        await writer.drain()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        async with http.post(stack.completions, data=b"{}") as answer:
            received = await answer.read()
        assert received.startswith(sent + glue + b"data: {")
        error = json.loads(received.removeprefix(sent + glue + b"data: "))["error"]
        assert error["code"] == "engine_broke"
    assert num_requests == 1  # never a second time after the first byte
    assert stack.metric("dropped_requests_total", reason="engine_broke") == 1
    await stack.wait_demand(in_flight=0)


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        pytest.param(b'HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"choices": [', "engine_broke", id="begun"),
        pytest.param(b"SSH-2.0-OpenSSH_9.2\r\n", "engine_lost", id="no HTTP"),
    ],
)
async def test_an_answer_that_is_not_whole_and_no_stream_becomes_502(
    stack: Stack, http: aiohttp.ClientSession, sent: bytes, code: str
) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()

    async with running_raw_engine(talk) as port:
        await stack.add_engine(port)
        status, body, _ = await post(http, stack.completions)
    assert (status, body["error"]["code"]) == (502, code)


@pytest.mark.parametrize("status", [400, 404, 500, 504])
async def test_an_engines_own_errors_pass(stack: Stack, http: aiohttp.ClientSession, status: int) -> None:
    async with running_engine(answering(web.json_response, data={"error": {}}, status=status)) as engine:
        await stack.add_engine(engine.port)
        assert (await post(http, stack.completions))[:2] == (status, {"error": {}})
    assert len(engine.requests) == 1


async def test_a_stream_is_ended_when_the_requests_time_is_over_whether_it_moves_or_not(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(requestTimeout="3s")

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request)
        while True:
            await answer.write(b"data: 1\n\n")
            await asyncio.sleep(0.1 if await request.read() == b"moving" else 3600)

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        began = time.monotonic()

        async def read(body: bytes) -> bytes:
            async with http.post(stack.completions, data=body) as answer:
                received = await answer.read()
            assert time.monotonic() - began >= 3
            return received

        for received in await asyncio.gather(read(b"moving"), read(b"{}")):
            assert received.startswith(b"data: 1\n\n")
            assert json.loads(received.split(b"data: ")[-1])["error"]["code"] == "deadline_exceeded"


async def test_a_client_that_reads_a_little_now_and_then_gives_its_place_back_in_time(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(batching={"maxBatchSize": 1}, requestTimeout="3s")
    event = b"data: " + b"x" * 1_000 + b"\n\n"

    async def handle(request: web.Request) -> web.StreamResponse:
        if await request.read() == b"victim":
            return web.json_response({})
        answer = await begin_stream(request)
        while True:
            await answer.write(event)

    async def trickle() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port, limit=1_024)
        head = f"POST /{stack.key}/v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{{}}"
        writer.write(head.encode())
        try:
            while await reader.read(4_096):  # noqa: ASYNC110  a client of its own kind, which waits for nothing
                await asyncio.sleep(0.05)
        finally:
            writer.close()

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        trickling = [asyncio.create_task(trickle()) for _ in range(4)]
        await stack.wait_demand(dispatched=2)
        await stack.wait_demand(in_flight=0)
        for task in trickling:
            task.cancel()
        assert (await post(http, stack.completions, b"victim"))[0] == 200
