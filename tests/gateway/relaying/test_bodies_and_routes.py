"""Tests how bodies are read and which service a request is for."""

import asyncio
import gzip
import hashlib
import json
import os
from collections.abc import AsyncIterator
from io import BytesIO

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import (
    answering,
    running_engine,
)
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get, post


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
