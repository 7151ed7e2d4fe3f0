"""Tests the life of a request through a whole gateway: queue, engine, retry, deadline and disconnect."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from openai import APIError, AsyncOpenAI
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import (
    SlowEngine,
    answering,
    begin_stream,
    running_engine,
)
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

BATCH_OF_ONE = {"batching": {"maxBatchSize": 1}}  # two places per engine


async def test_a_request_for_a_service_without_engines_waits_for_one(stack: Stack, http: aiohttp.ClientSession) -> None:
    request = asyncio.create_task(post(http, stack.completions))
    await stack.wait_demand(in_flight=1, queued=1, queue_depth=1, dispatched=0)
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        assert (await request)[0] == 200
    await stack.wait_demand(in_flight=0, queued=0, queue_depth=0, dispatched=0)


async def test_a_text_to_embed_goes_to_an_engine_like_any_other_request(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async with running_engine(answering(web.json_response, data={"object": "list"})) as engine:
        await stack.add_engine(engine.port)
        status, body, _ = await post(http, f"{stack.url}/embeddings", b'{"input": "the fox"}')
        assert (status, body) == (200, {"object": "list"})
        (received, sent), *_ = engine.requests
        assert (received.path, json.loads(sent)["input"]) == ("/v1/embeddings", "the fox")


async def test_a_full_queue_answers_429_and_the_demand_counts_each_state(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(**BATCH_OF_ONE, queue={"maxRequests": 1})
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        requests = [asyncio.create_task(post(http, stack.completions)) for _ in range(3)]
        await stack.wait_demand(in_flight=3, queued=1, queue_depth=1, dispatched=2)
        status, body, headers = await post(http, stack.completions)
        assert (status, 1 <= int(headers["Retry-After"]) <= 60) == (429, True)
        assert body["error"]["code"] == "queue_full"
        slow.gate.set()
        assert [status for status, _, _ in await asyncio.gather(*requests)] == [200] * 3
    await stack.wait_demand(in_flight=0, queued=0, queue_depth=0, dispatched=0)
    assert stack.metric("requests_total", code="429") == 1
    assert stack.metric("dropped_requests_total", reason="queue_full") == 1


async def test_requests_inside_the_batching_window_are_not_queue_depth(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(batching={"mode": "Static", "window": "1h"})
    request = asyncio.create_task(post(http, stack.completions))
    await stack.wait_demand(in_flight=1, queued=1, queue_depth=0, dispatched=0)
    request.cancel()
    await stack.wait_demand(in_flight=0, queued=0)


async def test_the_least_loaded_engine_gets_the_request(stack: Stack, http: aiohttp.ClientSession) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as one, running_engine(slow.handle) as other:
        await stack.add_engine(one.port)
        await stack.add_engine(other.port)
        requests = [asyncio.create_task(post(http, stack.completions)) for _ in range(6)]
        await stack.wait(lambda: slow.running == 6)
        assert (len(one.requests), len(other.requests)) == (3, 3)
        slow.gate.set()
        await asyncio.gather(*requests)


async def test_waiting_longer_than_the_queue_timeout_is_answered_504(stack: Stack, http: aiohttp.ClientSession) -> None:
    await stack.apply_service(queue={"timeout": "1s"})
    status, body, _ = await post(http, stack.completions)
    assert (status, body["error"]["code"]) == (504, "queue_timeout")
    assert "0 engines are ready" in body["error"]["message"]
    assert stack.demand()["in_flight"] == 0


async def test_the_clients_deadline_is_answered_504_in_the_queue_and_at_an_engine(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    status, body, _ = await post(http, stack.completions, X_Request_Timeout_Seconds="0.05")
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        status, body, _ = await post(http, stack.completions, X_Request_Timeout_Seconds="0.3")
        assert (status, body["error"]["code"]) == (504, "deadline_exceeded")
        assert len(engine.requests) == 1
        await stack.wait(lambda: slow.cancelled == 1)


async def test_the_engine_gets_the_time_that_is_left_at_most_the_services(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(requestTimeout="30s")
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        for seconds in ("20", "3600"):
            await post(http, stack.completions, X_Request_Timeout_Seconds=seconds)
        await post(http, stack.completions)
    left = [float(request.headers["X-Request-Timeout-Seconds"]) for request, _ in engine.requests]
    assert 10 < left[0] <= 20
    assert 20 < left[1] <= 30
    assert 20 < left[2] <= 30


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "soon", ""])
async def test_a_deadline_that_is_no_number_of_seconds_is_answered_400(
    stack: Stack, http: aiohttp.ClientSession, text: str
) -> None:
    status, body, _ = await post(http, stack.completions, X_Request_Timeout_Seconds=text)
    assert (status, body["error"]["param"]) == (400, "X-Request-Timeout-Seconds")


async def test_a_client_that_leaves_the_queue_is_dropped_at_once(stack: Stack, http: aiohttp.ClientSession) -> None:
    request = asyncio.create_task(post(http, stack.completions))
    await stack.wait_demand(queued=1)
    request.cancel()
    await stack.wait_demand(in_flight=0)
    assert stack.metric("requests_total", code="499") == 1
    assert stack.metric("dropped_requests_total", reason="client_gone") == 1


async def test_a_client_that_leaves_before_the_answer_is_passed_on_to_the_engine(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        request = asyncio.create_task(post(http, stack.completions))
        await stack.wait(lambda: slow.running == 1)
        request.cancel()
        await stack.wait(lambda: slow.cancelled == 1)
        await stack.wait_demand(in_flight=0)


async def test_a_client_that_leaves_in_the_middle_of_a_stream_is_passed_on_to_the_engine(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    cancelled = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            await begin_stream(request, b"data: 1\n\n")
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError("nobody waits an hour")

    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}") as answer:
            assert await answer.content.readany() == b"data: 1\n\n"
            answer.close()
        await asyncio.wait_for(cancelled.wait(), 20)
        await stack.wait_demand(in_flight=0)


async def test_an_engine_that_terminates_gets_no_new_request_and_ends_the_one_it_has(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as old, running_engine(answering(web.json_response, data={})) as new:
        await stack.add_engine(old.port)
        request = asyncio.create_task(post(http, stack.completions))
        await stack.wait(lambda: slow.running == 1)
        await stack.set_engine_ready(old.port, False)
        await stack.add_engine(new.port)
        for _ in range(3):
            assert (await post(http, stack.completions))[:2] == (200, {})
        slow.gate.set()
        assert (await request)[:2] == (200, {"engine": old.port})
        assert len(old.requests) == 1


async def test_deleting_a_service_answers_those_who_wait_and_lets_the_running_end(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(**BATCH_OF_ONE)
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        slow.gate.set()
        await post(http, stack.completions)
        assert stack.metric("queue_wait_seconds_count") == 1
        slow.gate.clear()
        requests = [asyncio.create_task(post(http, stack.completions)) for _ in range(3)]
        await stack.wait_demand(dispatched=2, queued=1)
        await asyncio.to_thread(stack.cluster.delete_service, "qwen")
        await stack.wait(lambda: stack.gateway.demand(stack.key) is None)
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        slow.gate.set()
        answers = await asyncio.gather(*requests)
    assert sorted(status for status, _, _ in answers) == [200, 200, 404]
    assert next(body for status, body, _ in answers if status == 404)["error"]["code"] == "service_deleted"
    assert stack.metric("queue_wait_seconds_count") == 0  # its series are gone


async def test_the_request_id_goes_to_the_engine_and_back_and_is_made_if_there_is_none(
    stack: Stack, http: aiohttp.ClientSession, gateway: GatewayProcess
) -> None:
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        sent = (await post(http, stack.completions, X_Request_Id="abc-1"))[2]["X-Request-Id"]
        made = (await post(http, stack.completions))[2]["X-Request-Id"]
        cleaned = (await post(http, stack.completions, X_Request_Id="a b"))[2]["X-Request-Id"]
    assert [request.headers["X-Request-Id"] for request, _ in engine.requests] == [sent, made, cleaned]
    assert sent == "abc-1"
    assert len(made) == len(cleaned) == 32
    await stack.wait(lambda: any(f"id={made} service={stack.key}" in line for line in gateway.log))


def make_chunk(text: str) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "qwen", "choices": [choice]}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


async def test_the_openai_client_streams_and_raises_when_the_engine_dies(stack: Stack) -> None:
    is_dying, die = asyncio.Event(), asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, make_chunk("Hel"), make_chunk("lo"))
        if is_dying.is_set():
            await die.wait()  # what was written when a connection is broken off may be lost
            assert request.transport is not None
            request.transport.abort()
        else:
            await answer.write(b"data: [DONE]\n\n")
        return answer

    async def send(client: AsyncOpenAI) -> AsyncIterator[str]:
        messages: Any = [{"role": "user", "content": "hi"}]
        async with await client.chat.completions.create(model="qwen", messages=messages, stream=True) as stream:
            async for chunk in stream:
                yield chunk.choices[0].delta.content or ""

    async with (
        AsyncOpenAI(base_url=stack.url, api_key="none", max_retries=0) as client,
        running_engine(handle) as engine,
    ):
        await stack.add_engine(engine.port)
        assert [text async for text in send(client)] == ["Hel", "lo"]
        assert [model.id async for model in client.models.list()] == ["qwen"]
        is_dying.set()
        dying = send(client)
        assert [await anext(dying), await anext(dying)] == ["Hel", "lo"]
        die.set()
        with pytest.raises(APIError, match="the engine failed during its response"):
            await anext(dying)


async def test_two_hundred_streams_at_once_arrive_whole(stack: Stack, http: aiohttp.ClientSession) -> None:
    await stack.apply_service(batching={"maxBatchSize": 1024})
    gate = asyncio.Event()
    running = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal running
        answer = await begin_stream(request, b"data: first\n\n")
        running += 1
        await gate.wait()
        await answer.write(b"data: last\n\n")
        return answer

    async def send() -> bytes:
        async with http.post(stack.completions, data=b"{}") as answer:
            return await answer.read()

    http.connector._limit = 0  # type: ignore[union-attr]  # the client's own limit of 100 connections
    async with running_engine(handle) as engine:
        await stack.add_engine(engine.port)
        requests = [asyncio.create_task(send()) for _ in range(200)]
        await stack.wait(lambda: running == 200)
        counts = {"in_flight": 200, "queue_depth": 0, "queued": 0, "dispatched": 200}
        assert counts.items() <= stack.demand().items()
        gate.set()
        assert set(await asyncio.gather(*requests)) == {b"data: first\n\ndata: last\n\n"}
    await stack.wait_demand(in_flight=0)


def test_the_engines_of_these_tests_are_not_on_a_loopback_address() -> None:
    """Otherwise the API server would refuse their EndpointSlices, and the tests would time out."""
    assert not own_address().startswith("127.")
