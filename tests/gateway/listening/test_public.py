"""Tests the public port's answers to requests without a route, and the routes of absolute targets."""

import asyncio
import json

import aiohttp
import pytest
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "path_not_found"),
        ("POST", "/v1/softmax", 404, "path_not_found"),
        ("POST", "/nowhere/nobody/v1/completions", 404, "service_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("HEAD", "/v1/completions", 405, None),
        ("GET", "/nowhere/nobody/health", 404, "service_not_found"),
        ("GET", "/nowhere/health", 404, "path_not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("GET", "/demand", 404, "path_not_found"),  # only on the admin port
        ("GET", "/metrics", 404, "path_not_found"),
    ],
)
async def test_what_is_not_there_is_answered_in_openais_form(
    gateway: GatewayProcess, http: aiohttp.ClientSession, method: str, path: str, status: int, code: str | None
) -> None:
    async with http.request(method, gateway.url + path) as answer:
        assert answer.status == status
        assert answer.headers["Content-Type"] == "application/json"
        assert len(answer.headers["X-Request-Id"]) == 32
        assert status != 405 or answer.headers["Allow"] in ("GET", "POST")
        if code:
            error = (await answer.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/", "/models", "/health"])
async def test_a_head_has_no_body_and_the_connection_goes_on(gateway: GatewayProcess, path: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 2)
    for _ in range(2):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
        assert head.startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_unknown_services_make_no_series(gateway: GatewayProcess, http: aiohttp.ClientSession) -> None:
    before = gateway.metric("conveyor_gateway_requests_total", namespace="", inference_service="", code="404")
    for number in range(3):
        await get(http, f"{gateway.url}/nowhere/nobody-{number}/v1/models")
    after = gateway.metric("conveyor_gateway_requests_total", namespace="", inference_service="", code="404")
    assert after == before + 3
    assert "nobody" not in gateway.admin("/metrics")[1]


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("http://qwen.{namespace}/v1/models/other", "model_not_found"),  # the service's own page
        ("http://other.{namespace}:80/v1/models", "service_not_found"),
        ("http://x@127.0.0.1:99/{namespace}/qwen/v1/models/other", "model_not_found"),
        ("http://[::1]/{namespace}/qwen/v1/models/other", "model_not_found"),
        ("http://[::1]/v1/nothing", "path_not_found"),
    ],
)
async def test_the_host_of_an_absolute_target_counts_and_not_the_header(stack: Stack, target: str, code: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.gateway.port)
    target = target.format(namespace=stack.cluster.namespace)
    writer.write(
        f"GET {target} HTTP/1.1\r\nHost: nothing.{stack.cluster.namespace}\r\nConnection: close\r\n\r\n".encode()
    )
    received = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == code
