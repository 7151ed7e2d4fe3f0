"""Tests the life of a request through a whole gateway: queue, engine, retry, deadline and disconnect."""

import asyncio
import gzip
import hashlib
import json
import os
from collections.abc import AsyncIterator
from io import BytesIO
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
from tests.gateway.stack import Stack, get, post

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


@pytest.mark.parametrize("path", ["/{key}/v1/completions", "/v1/completions"])
@pytest.mark.parametrize("is_announced", [True, False])
async def test_a_body_above_the_limit_is_answered_413(
    stack: Stack, http: aiohttp.ClientSession, is_announced: bool, path: str
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        """Yield only as much as the gateway reads. A socket that still sends would outlive this test's event loop."""
        for _ in range(0 if is_announced else 8):
            yield b" " * (1 << 20)
        yield b" "

    headers = {"Content-Length": str((8 << 20) + 1)} if is_announced else {}
    url = stack.gateway.url + path.format(key=stack.key)
    async with http.post(url, data=pieces(), headers=headers) as answer:
        assert answer.status == 413
        error = (await answer.json())["error"]
    assert error["code"] == "request_too_large"


async def test_a_long_body_at_the_root_is_routed_by_its_model(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    long = {"messages": [{"role": "user", "content": "x" * (7 << 20)}]}
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        for body in ({**long, "model": stack.key}, {"model": stack.key, **long}):
            assert (await post(http, f"{gateway.url}/v1/chat/completions", json.dumps(body).encode()))[0] == 200
        assert [json.loads(body) for _, body in engine.requests] == [{**long, "model": "qwen"}] * 2


async def send_empty_blocks() -> AsyncIterator[bytes]:
    """Send 9 MiB of gzip that decompress to nothing, without a length."""
    yield gzip.compress(b"")[:10]
    for _ in range(9):
        yield b"\x00\x00\x00\xff\xff" * ((1 << 20) // 5)


@pytest.mark.parametrize("is_root", [True, False])
async def test_a_compressed_body_is_decompressed(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession, is_root: bool
) -> None:
    url = f"{gateway.url}/v1/completions" if is_root else stack.completions
    body = json.dumps({"model": stack.key, "prompt": [hashlib.sha256(b"%d" % n).hexdigest() for n in range(30_000)]})
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        assert (await post(http, url, gzip.compress(body.encode()), Content_Encoding="gzip"))[0] == 200
        for wrong, encoding, status, code in (
            (body.encode(), "gzip", 400, "malformed_body"),
            (gzip.compress(b" " * (1 << 20)), "gzip", 400, "malformed_body"),
            (gzip.compress(os.urandom(5 << 20).hex().encode(), 1), "gzip", 413, "request_too_large"),
            (body.encode(), "br", 415, "encoded_body"),
        ):
            answer = await post(http, url, wrong, Content_Encoding=encoding)
            assert (answer[0], answer[1]["error"]["code"]) == (status, code)
        async with http.post(url, data=send_empty_blocks(), headers={"Content-Encoding": "gzip"}) as refused:
            assert (refused.status, (await refused.json())["error"]["code"]) == (413, "request_too_large")
    ((request, sent),) = engine.requests
    assert json.loads(sent) == {**json.loads(body), "model": "qwen" if is_root else stack.key}
    assert "Content-Encoding" not in request.headers


async def test_only_a_request_that_could_be_answered_wakes_a_service(stack: Stack, http: aiohttp.ClientSession) -> None:
    await stack.apply_service(autoscaling={"minReplicas": 0, "maxReplicas": 1})
    model = {"uri": "hf://org/model", "task": "Generate"}
    await asyncio.to_thread(stack.cluster.set_status, "qwen", desiredReplicas=0, model=model)
    while True:
        if (await get(http, f"{stack.url}/health"))[0] == 200:  # the gateway knows that it sleeps
            break
        await asyncio.sleep(0.02)
    for path, body, code in (
        ("chat/completions", b"{", "invalid_json"),
        ("chat/completions", b"[]", "invalid_json"),
        ("chat/completions", b"", "invalid_json"),
        ("chat/completions", b"[" * (2 << 20), "invalid_json"),
        ("chat/completions", b"{}", "invalid_value"),
        ("completions", b'{"messages": []}', "invalid_value"),
        ("messages", b'{"messages": []}', "invalid_value"),
        ("embeddings", b"{}", "wrong_task"),
        ("audio/transcriptions", b"{}", "wrong_task"),
    ):
        status, answer, _ = await post(http, f"{stack.url}/{path}", body)
        assert (status, answer["error"]["code"]) == (400, code), (path, body[:5])
    for method, path, status in (
        ("GET", "models", 200), ("HEAD", "models", 200), ("GET", "health", 200), ("HEAD", "health", 200),
        ("GET", "chat/completions", 405), ("OPTIONS", "chat/completions", 405), ("POST", "nothing", 404),
    ):  # fmt: skip
        async with http.request(method, f"{stack.url}/{path}") as page:
            assert page.status == status, (method, path)
    assert stack.metric("queue_wait_seconds_count") == 0, "no request was queued"
    request = asyncio.create_task(post(http, f"{stack.url}/chat/completions", b'{"messages": []}'))
    await stack.wait_demand(queued=1)
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        assert (await request)[0] == 200


async def test_a_client_without_a_body_for_the_root_is_answered_400(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    status, body, _ = await post(http, f"{gateway.url}/v1/completions", b"")
    assert (status, body["error"]["code"]) == (400, "invalid_json")


async def test_on_the_root_the_model_names_the_service_and_the_engine_gets_the_name_it_knows(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name})
    await stack.claim_name(own_name)
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        exact = json.dumps({"model": own_name, "x": 1}, indent=3).encode()
        for body in (exact, json.dumps({"model": stack.key, "x": 1}).encode()):
            assert (await post(http, f"{gateway.url}/v1/completions", body))[0] == 200
        status, body_404, _ = await post(http, f"{gateway.url}/v1/completions", b'{"model": "nobodys"}')
        assert (status, body_404["error"]["code"]) == (404, "model_not_found")
    assert engine.requests[0][1] == exact
    assert json.loads(engine.requests[1][1]) == {"model": own_name, "x": 1}


async def test_on_the_root_a_form_as_long_as_any_body_is_routed_by_its_model(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    picture = bytes(range(256)) * 20_000
    url = f"{gateway.url}/v1/images/classify"
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        form = aiohttp.FormData({"model": stack.key})
        form.add_field("image", BytesIO(picture), filename="a.jpg", content_type="image/jpeg")
        async with http.post(url, data=form) as answer:
            assert answer.status == 200, await answer.text()
        (sent, body), *_ = engine.requests
        assert sent.headers["Content-Type"].startswith("multipart/form-data; boundary=")
        assert b'name="model"\r\n\r\nqwen\r\n' in body
        assert stack.key.encode() not in body
        assert picture in body
        late = aiohttp.FormData()
        late.add_field("image", BytesIO(picture), filename="a.jpg")
        late.add_field("model", stack.key)
        async with http.post(url, data=late) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["code"], error["param"]) == (400, "no_model", "model")


async def test_the_host_names_the_service_and_a_host_of_one_part_is_misdirected(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        url = f"{gateway.url}/v1/completions"
        assert (await post(http, url, Host=f"qwen.{stack.cluster.namespace}.svc.cluster.local"))[0] == 200
        status, body, _ = await post(http, url, Host="qwen")
    assert (status, body["error"]["code"]) == (421, "host_without_namespace")
    assert "/<namespace>/qwen/v1" in body["error"]["message"]


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
