"""Tests /v1/messages with Anthropic's client through a whole gateway: routes like chat's, and errors in its format."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import pytest
from aiohttp import web
from anthropic import AsyncAnthropic
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import answering, begin_stream, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

ASKED: dict[str, Any] = {"model": "qwen", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
MESSAGE = {
    "id": "msg_1", "type": "message", "role": "assistant", "model": "qwen", "stop_reason": "end_turn",
    "content": [{"type": "text", "text": "b"}], "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip
REFUSAL = {"type": "error", "error": {"type": "invalid_request_error", "message": "no such field", "code": "x"}}
START = b"event: message_start\ndata: " + json.dumps({"type": "message_start", "message": MESSAGE}).encode() + b"\n\n"


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=stack.url.removesuffix("/v1"), api_key="sk-any", max_retries=0) as opened:
        yield opened


async def test_a_message_is_passed_on_without_the_client_s_key(stack: Stack, client: AsyncAnthropic) -> None:
    async with running_engine(answering(web.json_response, data=MESSAGE)) as engine:
        await stack.add_engine(engine.port)
        message: Any = await client.messages.create(**ASKED)
        assert message.content[0].text == "b"
        ((request, body),) = engine.requests
        assert request.path == "/v1/messages"
        assert json.loads(body) == ASKED
        assert not {"X-Api-Key", "Anthropic-Version"} & request.headers.keys()


async def test_the_root_finds_the_service_by_the_model(stack: Stack, gateway: GatewayProcess) -> None:
    async with (
        AsyncAnthropic(base_url=gateway.url, api_key="-", max_retries=0) as client,
        running_engine(answering(web.json_response, data={"input_tokens": 7})) as engine,
    ):
        await stack.add_engine(engine.port)
        fields = {name: value for name, value in ASKED.items() if name != "max_tokens"}
        counted = await client.messages.count_tokens(**fields | {"model": stack.key})
        assert counted.input_tokens == 7
        with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
            await client.messages.create(**ASKED | {"model": "nobody/none"})


@pytest.mark.parametrize("path", ["/nowhere/nobody/v1/messages", "/nowhere/nobody/v1/messages/count_tokens"])
async def test_what_is_not_there_is_answered_in_anthropics_form(
    stack: Stack, gateway: GatewayProcess, http: aiohttp.ClientSession, path: str
) -> None:
    async with http.post(gateway.url + path, json=ASKED) as answer:
        assert answer.status == 404
        error = await answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "not_found_error")
    assert error["error"]["code"] == "service_not_found"


async def test_an_engine_that_dies_in_a_stream_ends_it_with_an_event_that_the_client_raises(
    stack: Stack, client: AsyncAnthropic
) -> None:
    async def die(request: web.Request) -> web.StreamResponse:
        answer = await begin_stream(request, START)
        assert request.transport is not None
        request.transport.abort()
        return answer

    async with running_engine(die) as engine:
        await stack.add_engine(engine.port)
        stream: Any = await client.messages.create(**ASKED, stream=True)
        with pytest.raises(anthropic.APIStatusError, match="api_error"):
            async for _ in stream:
                pass


class TestAtZero:
    """Tests of a stream that waits for a service at zero."""

    @pytest.fixture
    def gateway(self, cluster: Cluster, kubeconfig: Path) -> Iterator[GatewayProcess]:
        flags = ("--watch-namespaces", cluster.namespace, "--heartbeat-seconds", "0.05", "--drain-delay-seconds", "0")
        with GatewayProcess(kubeconfig, *flags) as started:
            yield started

    @pytest.fixture
    async def stack(self, gateway: GatewayProcess, cluster: Cluster) -> Stack:
        stack = Stack(gateway, cluster)
        await stack.apply_service(autoscaling={"minReplicas": 0, "maxReplicas": 2})
        return stack

    async def test_the_client_reads_over_empty_lines_and_raises_the_refusal(
        self, stack: Stack, client: AsyncAnthropic
    ) -> None:
        async with running_engine(answering(web.json_response, data=REFUSAL, status=400)) as engine:
            stream: Any = await asyncio.wait_for(client.messages.create(**ASKED, stream=True), 60)
            await stack.add_engine(engine.port)
            with pytest.raises(anthropic.APIStatusError, match="no such field"):
                async for _ in stream:
                    pass
