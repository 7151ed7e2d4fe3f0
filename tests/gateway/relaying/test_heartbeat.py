"""Tests a stream that waits for an engine.

Empty lines keep its connection, and the answer follows in the stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import APIError, AsyncOpenAI
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import answering, begin_stream, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

STREAM = json.dumps({"stream": True, "messages": []}).encode()
ZERO: dict[str, Any] = {"autoscaling": {"minReplicas": 0, "maxReplicas": 2}}
EVENT = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'


@pytest.fixture
def gateway(cluster: Cluster, kubeconfig: Path) -> Iterator[GatewayProcess]:
    flags = ("--watch-namespaces", cluster.namespace, "--heartbeat-seconds", "0.05", "--drain-delay-seconds", "0")
    with GatewayProcess(kubeconfig, *flags) as started:
        yield started


@pytest.fixture
async def stack(gateway: GatewayProcess, cluster: Cluster) -> Stack:
    stack = Stack(gateway, cluster)
    await stack.apply_service(**ZERO)
    return stack


@pytest.fixture
async def stream(stack: Stack, http: aiohttp.ClientSession) -> AsyncIterator[aiohttp.ClientResponse]:
    """A waiting request whose response has begun."""
    async with http.post(f"{stack.url}/chat/completions", data=STREAM) as answer:
        assert (answer.status, answer.content_type) == (200, "text/event-stream")
        assert answer.headers["X-Request-Id"]
        assert answer.headers["X-Accel-Buffering"] == "no"
        assert await answer.content.readuntil(b"\n\n") == b"\n\n"
        yield answer


async def read(stream: aiohttp.ClientResponse) -> list[bytes]:
    """Return the events that follow, without the empty lines."""
    return [event for event in (await stream.read()).split(b"\n\n") if event]


async def talk(request: web.Request) -> web.StreamResponse:
    return await begin_stream(request, EVENT, b"data: [DONE]\n\n")


async def test_the_engine_s_events_follow_the_empty_lines(stack: Stack, stream: aiohttp.ClientResponse) -> None:
    async with running_engine(talk) as engine:
        await stack.add_engine(engine.port)
        assert await read(stream) == [EVENT.strip(), b"data: [DONE]"]
    await stack.wait_demand(in_flight=0)


async def test_openai_s_client_reads_on_over_them(stack: Stack) -> None:
    async with AsyncOpenAI(base_url=stack.url, api_key="-", max_retries=0) as client, running_engine(talk) as engine:
        request = asyncio.create_task(client.chat.completions.create(model="qwen", messages=[], stream=True))
        answer = await request
        await stack.add_engine(engine.port)
        assert [chunk.id async for chunk in answer] == ["1"]


async def test_a_refusal_of_the_engine_is_an_event(stack: Stack) -> None:
    refusal = answering(web.json_response, data={"error": {"message": "no such field", "code": "x"}}, status=400)
    async with AsyncOpenAI(base_url=stack.url, api_key="-", max_retries=0) as client, running_engine(refusal) as engine:
        answer = await client.chat.completions.create(model="qwen", messages=[], stream=True)
        await stack.add_engine(engine.port)
        with pytest.raises(APIError, match="no such field"):
            async for _ in answer:
                pass
    await stack.wait(lambda: stack.metric("requests_total", code="400") == 1)


@pytest.mark.parametrize("text", ["<html>", '{"detail": "no"}', "[1]"])
async def test_an_engine_that_answers_with_neither_causes_an_error(
    stack: Stack, stream: aiohttp.ClientResponse, text: str
) -> None:
    """Otherwise the stream would end as if there were no error."""
    async with running_engine(answering(web.Response, text=text, status=400)) as engine:
        await stack.add_engine(engine.port)
        (event,) = await read(stream)
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "engine_broke"


async def test_a_wait_that_is_too_long_ends_the_stream_with_an_error(stack: Stack, http: aiohttp.ClientSession) -> None:
    await stack.apply_service(**ZERO, queue={"timeout": "1s"})
    async with http.post(f"{stack.url}/chat/completions", data=STREAM) as answer:
        (event,) = await read(answer)
    error = json.loads(event.removeprefix(b"data: "))["error"]
    assert error["code"] == "queue_timeout"
    assert stack.metric("dropped_requests_total", reason="queue_timeout") == 1
    assert stack.metric("requests_total", code="504") == 1, "alerts count such streams by their code"


async def test_a_gateway_that_stops_ends_it_with_an_error(
    stack: Stack, gateway: GatewayProcess, stream: aiohttp.ClientResponse
) -> None:
    gateway.terminate()
    await stack.wait(lambda: "draining" in gateway.admin("/readyz")[1])
    gateway.terminate()  # a second one ends the waiting
    events = await read(stream)
    assert [json.loads(event.removeprefix(b"data: "))["error"]["code"] for event in events] == ["stopping"]


async def test_a_client_that_requests_no_stream_gets_a_status(stack: Stack, http: aiohttp.ClientSession) -> None:
    await stack.apply_service(**ZERO, queue={"timeout": "1s"})
    for body in (b"{}", b'{"stream": false}', b'{"stream": 1}', b"[", b"\xff" * 9):
        status, answer, _ = await post(http, f"{stack.url}/chat/completions", body)
        assert (status, answer["error"]["code"]) == (504, "queue_timeout")
    status, answer, _ = await post(http, f"{stack.url}/embeddings", STREAM)
    assert (status, answer["error"]["code"]) == (504, "queue_timeout")


async def test_without_a_heartbeat_an_error_keeps_its_status(
    cluster: Cluster, kubeconfig: Path, http: aiohttp.ClientSession
) -> None:
    flags = ("--watch-namespaces", cluster.namespace, "--heartbeat-seconds", "0")
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, cluster)
        await stack.apply_service(**ZERO, queue={"timeout": "1s"})
        status, answer, _ = await post(http, f"{stack.url}/chat/completions", STREAM)
    assert (status, answer["error"]["code"]) == (504, "queue_timeout")


async def test_streams_of_services_that_never_go_to_zero_wait_in_the_same_way(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service()
    async with http.post(f"{stack.url}/chat/completions", data=STREAM) as answer, running_engine(talk) as engine:
        assert await answer.content.readuntil(b"\n\n") == b"\n\n"
        await stack.add_engine(engine.port)
        assert await read(answer) == [EVENT.strip(), b"data: [DONE]"]


async def test_a_stream_that_waits_for_its_first_token_gets_empty_lines_too(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    may_answer = asyncio.Event()

    async def think(request: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return await talk(request)

    await stack.apply_service()
    async with running_engine(think) as engine:
        await stack.add_engine(engine.port)
        async with http.post(f"{stack.url}/chat/completions", data=STREAM) as answer:
            assert await answer.content.readuntil(b"\n\n") == b"\n\n"
            may_answer.set()
            assert await read(answer) == [EVENT.strip(), b"data: [DONE]"]
