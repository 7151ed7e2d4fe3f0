"""Tests what clients outside the cluster get through the doors of docs/expose.md."""

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml
from aiohttp import web
from tests.chart.installation import path_of
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import EngineServer
from tests.expose.conftest import Exposed, contour_settings, event, manifests, trusting
from tests.expose.doors import Door, conditions
from tests.gateway.engine_servers import SlowEngine, answering, begin_stream, running_engine
from tests.gateway.stack import Stack
from tests.operator.inferenceservice.test_http_route import read_route

from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane

pytestmark = pytest.mark.brings_contour

MESSAGES: Any = [{"role": "user", "content": "Tell me about lists."}]
USUAL_LIMIT_SECONDS = 60.0  # of nginx and of most cloud load balancers; Envoy's is 15 s
MIB = 1 << 20


def connect(exposed: Exposed, stack: Stack, client: httpx.AsyncClient, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=exposed.url(stack), api_key=key, http_client=client, max_retries=0)


async def test_a_chat_reaches_a_real_engine(exposed: Exposed, published: Stack, tmp_path: Path) -> None:
    model = write_chat_model(tmp_path / "model")
    with EngineServer(tmp_path / "engine", model, host="0.0.0.0", served_model_name="qwen") as engine:
        await asyncio.to_thread(engine.wait_ready)
        await published.add_engine(int(engine.url.rpartition(":")[2]))
        async with exposed.client() as client:
            chat = connect(exposed, published, client).chat.completions
            answer = await chat.create(model="qwen", messages=MESSAGES, max_tokens=8, temperature=0)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 8
            stream = await chat.create(model="qwen", messages=MESSAGES, max_tokens=8, temperature=0, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == answer.choices[0].message.content


async def test_a_client_that_does_not_trust_the_authority_is_not_connected(exposed: Exposed, published: Stack) -> None:
    async with exposed.client(ssl.create_default_context()) as client:
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            await client.get(f"{exposed.url(published)}/models")


async def test_only_the_published_namespace_is_reached(exposed: Exposed, published: Stack) -> None:
    async with exposed.client() as client:
        base = exposed.url(published)
        inside = await client.get(f"{base}/models")
        outside = await client.get(base.replace(published.key, "other/qwen") + "/models")
        root = await client.get(base.replace(f"/{published.key}", "") + "/models")
        assert (inside.status_code, outside.status_code, root.status_code) == (200, 404, 404)
        assert not outside.content
        assert not root.content  # by Envoy, not by the gateway, whose answers have bodies


async def test_each_event_arrives_before_the_next_one_is_sent(exposed: Exposed, published: Stack) -> None:
    gate = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, event("first"))
        await gate.wait()
        await answer.write(event("second") + b"data: [DONE]\n\n")
        return answer

    async with running_engine(handle) as engine, exposed.client() as client:
        await published.add_engine(engine.port)
        create = connect(exposed, published, client).completions.create
        pieces = aiter(await create(model="qwen", prompt="x", stream=True))
        assert (await anext(pieces)).choices[0].text == "first"
        gate.set()
        assert (await anext(pieces)).choices[0].text == "second"


async def test_an_answer_may_take_longer_than_a_proxy_usually_allows(exposed: Exposed, published: Stack) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine, exposed.client() as client:
        await published.add_engine(engine.port)
        answer = asyncio.create_task(client.post(f"{exposed.url(published)}/completions", json={"model": "qwen"}))
        await asyncio.wait([answer], timeout=USUAL_LIMIT_SECONDS + 5)
        assert slow.running == 1
        slow.gate.set()
        assert (await answer).status_code == 200


async def test_without_the_page_s_limit_envoy_ends_a_request(exposed: Exposed, published: Stack) -> None:
    objects = manifests(f"kind: {exposed.kind}\n")
    objects[-1]["metadata"].pop("annotations", None)
    for rule in objects[-1]["spec"]["rules"]:
        rule.pop("timeouts", None)
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine, exposed.client() as client:
        await published.add_engine(engine.port)
        await exposed.withdraw(published)
        await exposed.publish(published, *objects)
        await exposed.wait_published(published)
        answer = await client.post(f"{exposed.url(published)}/completions", json={"model": "qwen"})
        assert answer.status_code == 504
        await published.wait(lambda: slow.cancelled == 1)


async def test_a_body_may_be_as_long_as_the_gateway_allows(exposed: Exposed, published: Stack) -> None:
    async with running_engine(answering(web.json_response, data={})) as engine, exposed.client() as client:
        await published.add_engine(engine.port)
        body = b'{"model": "qwen", "prompt": ""}'.ljust(8 * MIB)
        assert (await client.post(f"{exposed.url(published)}/completions", content=body)).status_code == 200
        assert len(engine.requests[-1][1]) == len(body)


@pytest.mark.parametrize("exposed", ["HTTPRoute"], indirect=True)
async def test_a_route_lets_in_the_key_of_its_namespace_only(exposed: Exposed, published: Stack) -> None:
    await exposed.withdraw(published)
    await exposed.publish(published, *manifests("sk-of-team-a"))
    await exposed.wait_published(published, Authorization="Bearer sk-of-team-a")
    async with exposed.client() as client:
        assert (await connect(exposed, published, client, "sk-of-team-a").models.list()).data[0].id == "qwen"
        for key in ("sk-of-team-b", "none"):
            with pytest.raises(openai.NotFoundError):
                await connect(exposed, published, client, key).models.list()
        async with running_engine(answering(web.json_response, data={})) as engine:
            await published.add_engine(engine.port)
            headers = {"Authorization": "Bearer sk-of-team-a", "X-Client": "forged"}
            answer = await client.post(f"{exposed.url(published)}/completions", content=b"{}", headers=headers)
            assert answer.status_code == 200
    (line,) = [each for each in published.gateway.log if f" id={answer.headers['X-Request-Id']} " in each]
    assert " client=team-a " in line


@pytest.mark.parametrize("exposed", ["HTTPRoute"], indirect=True)
async def test_contour_does_not_split_by_filters_of_backends(exposed: Exposed, published: Stack) -> None:
    """The route of docs/operations.md needs such filters, so it does not work with Contour."""
    route = read_route()
    route["spec"]["hostnames"] = ["models.example.com"]
    await exposed.publish(published, route)
    path = path_of(exposed.api, route)
    await published.wait(lambda: "RequestHeaderModifier" in conditions(exposed.api.get(path)))
    assert '"ResolvedRefs"' in conditions(exposed.api.get(path))
    await asyncio.to_thread(exposed.api.delete, path)


async def test_contour_s_setting_limits_how_long_an_answer_is_silent(
    stack: Stack, crd: Any, control_plane: ControlPlane, authority: Authority, tmp_path: Path
) -> None:
    """Uses the page's setting with two seconds, because its 11 minutes are too long for a test."""
    settings = yaml.safe_load(yaml.safe_dump(contour_settings()).replace("11m", "2s"))
    assert settings != contour_settings()
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        with Door(control_plane, tmp_path).running("contour", settings) as door:
            exposed = Exposed("Ingress", door, trusting(authority), crd)
            await exposed.publish(stack)
            await exposed.wait_published(stack)
            async with exposed.client() as client:
                answer = await client.post(f"{exposed.url(stack)}/completions", json={"model": "qwen"})
                assert answer.status_code in (408, 504)
