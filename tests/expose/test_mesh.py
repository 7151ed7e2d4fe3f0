"""Tests that gateway and engines work between the sidecars of a mesh with strict mutual TLS (docs/tls.md)."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from aiohttp import web
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tests.expose.conftest import event
from tests.expose.mesh import Sidecars, sidecars
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import SlowEngine, answering, begin_stream, running_engine
from tests.gateway.stack import Stack

from e2e.cluster.certificates import Authority

pytestmark = pytest.mark.brings_contour  # which brings Envoy too

MESSAGES: Any = [{"role": "user", "content": "Tell me about lists."}]
ENVOYS_LIMIT_SECONDS = 15.0  # for a request, unless the route sets another one


@pytest.fixture
async def client(stack: Stack, authority: Authority, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client whose sidecar reaches the gateway's."""
    with sidecars(authority, tmp_path / "gateway", "conveyor-gateway", "conveyor-system", stack.gateway.port) as found:
        url = f"http://{own_address()}:{found.outbound}/{stack.key}/v1"
        headers = {"Host": "conveyor-gateway.conveyor-system.svc.cluster.local"}
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, default_headers=headers) as client:
            yield client


@asynccontextmanager
async def engine_behind_sidecars(
    stack: Stack, authority: Authority, folder: Path, port: int
) -> AsyncIterator[Sidecars]:
    """Add an engine to the service, which the gateway reaches through both sidecars."""
    with sidecars(authority, folder / "engine", "qwen-engine", stack.cluster.namespace, port) as found:
        await stack.add_engine(found.outbound)
        yield found


async def test_a_chat_and_its_stream_pass_all_sidecars(
    client: openai.AsyncOpenAI, stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    model = write_chat_model(tmp_path / "model")
    with EngineServer(tmp_path / "server", model, host="0.0.0.0", served_model_name="qwen") as engine:
        await asyncio.to_thread(engine.wait_ready)
        async with engine_behind_sidecars(stack, authority, tmp_path, int(engine.url.rpartition(":")[2])):
            create = client.chat.completions.create
            answer = await create(model="qwen", messages=MESSAGES, max_tokens=8, temperature=0)
            stream = await create(model="qwen", messages=MESSAGES, max_tokens=8, temperature=0, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == answer.choices[0].message.content
            with pytest.raises(openai.NotFoundError, match="absent"):  # the engine's answer
                await create(model="absent", messages=MESSAGES)


async def test_events_arrive_one_by_one_and_a_silent_stream_is_not_cut(
    client: openai.AsyncOpenAI, stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    gate = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, event("first"))
        await gate.wait()
        await answer.write(event("second") + b"data: [DONE]\n\n")
        return answer

    async with running_engine(handle) as engine, engine_behind_sidecars(stack, authority, tmp_path, engine.port):
        pieces = aiter(await client.completions.create(model="qwen", prompt="x", stream=True))
        assert (await anext(pieces)).choices[0].text == "first"
        await asyncio.sleep(ENVOYS_LIMIT_SECONDS + 5)
        gate.set()
        assert (await anext(pieces)).choices[0].text == "second"


async def test_a_client_that_leaves_ends_its_request_at_the_engine(
    client: openai.AsyncOpenAI, stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine, engine_behind_sidecars(stack, authority, tmp_path, engine.port):
        request = asyncio.create_task(client.completions.create(model="qwen", prompt="x"))
        await stack.wait(lambda: slow.running == 1)
        request.cancel()
        await stack.wait(lambda: slow.cancelled == 1)


async def test_only_the_name_of_the_engines_service_leads_to_an_engine(
    stack: Stack, authority: Authority, tmp_path: Path
) -> None:
    """The gateway's requests have this name. The address of the pod, which a client would send, has no route."""
    async with (
        running_engine(answering(web.json_response, data={})) as engine,
        engine_behind_sidecars(stack, authority, tmp_path, engine.port) as found,
        httpx.AsyncClient() as http,
    ):
        url = f"http://{own_address()}:{found.outbound}/health"
        name = f"qwen-engine.{stack.cluster.namespace}.svc"
        assert (await http.get(url, headers={"Host": f"{name}:8000"})).status_code == 200
        assert (await http.get(url)).status_code == 503, "the pod's sidecar accepts mutual TLS only"
        assert {request.headers["Host"].partition(":")[0] for request, _ in engine.requests} == {name}
