"""Tests that a service that has lost its last ready engine uses engines that still answer as its pods."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import make_slice, own_address
from tests.gateway.engine_servers import Engine, running_engine
from tests.gateway.stack import Stack

from conveyor_protocol.request_headers import POD_HEADER

POD = "qwen-engine-6f9c-abcde"
BODY = {"model": "qwen", "prompt": "hello"}


@contextlib.asynccontextmanager
async def engine_of(pod: str, status: int = 200) -> AsyncIterator[Engine]:
    """Run an engine that says that it is this pod, and answers completions."""

    async def handle(request: web.Request) -> web.StreamResponse:
        if request.path == "/readyz":
            return web.json_response({"status": "ready"}, status=status, headers={POD_HEADER: pod})
        return web.json_response({"choices": []})

    async with running_engine(handle) as engine:
        yield engine


def prompts(engine: Engine) -> int:
    return sum(request.method == "POST" for request, _ in engine.requests)


async def publish(stack: Stack, port: int, pod: str = POD, **conditions: bool) -> None:
    target = {"kind": "Pod", "name": pod, "namespace": stack.cluster.namespace, "uid": f"uid-of-{pod}"}
    endpoint = {"addresses": [own_address()], "conditions": conditions, "targetRef": target}
    body = make_slice(f"qwen-{port}", stack.cluster.namespace, "qwen", port, endpoint)
    path = f"/apis/discovery.k8s.io/v1/namespaces/{stack.cluster.namespace}/endpointslices/qwen-{port}"
    await asyncio.to_thread(stack.cluster.api.apply, path, body)


async def lose_node(stack: Stack, port: int, pod: str = POD) -> None:
    """Let Kubernetes mark the only engine as not ready, as it does when its node stops reporting."""
    await publish(stack, port, pod, ready=True, serving=True)
    await stack.wait(lambda: stack.num_engines() == 1)
    await publish(stack, port, pod, ready=False, serving=False)
    await stack.wait(lambda: stack.num_engines() == 0)


async def post(stack: Stack, http: aiohttp.ClientSession, seconds: float = 30) -> int:
    headers = {"X-Request-Timeout-Seconds": f"{seconds:g}"}
    async with http.post(stack.completions, json=BODY, headers=headers) as response:
        return response.status


async def test_an_engine_whose_node_is_lost_gets_requests_while_it_answers(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async with engine_of(POD) as engine:
        await lose_node(stack, engine.port)
        assert [await post(stack, http) for _ in range(3)] == [200] * 3
        assert prompts(engine) == 3
        await publish(stack, engine.port, ready=False, serving=False, terminating=True)
        await stack.wait(lambda: stack.num_engines() == 0)
        assert await post(stack, http, 2) == 504
        assert prompts(engine) == 3, "a pod that is being deleted gets no new request"


async def test_a_doubtful_engine_gets_nothing_while_another_one_is_ready(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async with engine_of(POD) as doubtful, engine_of("other") as ready:
        await lose_node(stack, doubtful.port)
        assert await post(stack, http) == 200
        await publish(stack, ready.port, "other", ready=True, serving=True)
        await stack.wait(lambda: prompts(doubtful) == 1 and stack.num_engines() == 1)
        await asyncio.sleep(1)
        assert [await post(stack, http) for _ in range(4)] == [200] * 4
        assert (prompts(doubtful), prompts(ready)) == (1, 4)


@pytest.mark.parametrize(("pod", "status"), [("another-team-s-pod", 200), (POD, 503), ("", 200)])
async def test_an_address_that_is_not_the_pod_s_or_not_ready_gets_no_prompt(
    stack: Stack, http: aiohttp.ClientSession, pod: str, status: int
) -> None:
    async with engine_of(pod, status) as engine:
        await lose_node(stack, engine.port)
        assert await post(stack, http, 3) == 504
        assert prompts(engine) == 0
        assert any(request.path == "/readyz" for request, _ in engine.requests), "it was asked"


async def test_an_engine_that_nobody_waits_for_is_not_asked(stack: Stack) -> None:
    async with engine_of(POD) as engine:
        await lose_node(stack, engine.port)
        await asyncio.sleep(2)
        assert engine.requests == []
