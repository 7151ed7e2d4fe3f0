"""Tests `kubectl conveyor why` with a real gateway, whose admin port it reads by URL."""

import asyncio
import contextlib
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.conftest import cluster, gateway, http, stack
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.stack import Stack
from tests.metrics.aggregation import Aggregated

from conveyor_kubectl.command import main

__all__ = ["cluster", "gateway", "http", "stack"]

USED = '{"prompt_tokens":7,"cached_tokens":2,"completion_tokens":5,"receipt":[41.0,0.0,2.0,0.0,3.0,4.0,2.5,0,null]}'


async def why(stack: Stack, request_id: str, *flags: str) -> int:
    url = f"http://127.0.0.1:{stack.gateway.admin_port}"
    return await asyncio.to_thread(main, ["why", request_id, "--gateway", url, *flags])


async def test_the_sentence_is_about_the_request(
    stack: Stack, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_engine(answering(web.json_response, data={}, headers={"X-Engine-Usage": USED})) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}", headers={"X-Request-Id": "a?b&c"}) as got:
            assert got.status == 200
    assert await why(stack, "a?b&c") == 0
    words = capsys.readouterr().out
    assert words.startswith(f"{stack.key} answered a?b&c with 200 in ")
    assert words.endswith("It cost 41 ms of the engine's steps.\n")
    assert await why(stack, "a?b&c", "--output=json") == 0
    receipt = json.loads(capsys.readouterr().out)
    assert receipt["used"]["receipt"]["engine_ms"] == 41.0


async def test_the_page_s_command_reads_a_receipt(
    stack: Stack, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs/receipts.md").read_text()
    (command,) = (line for line in page.splitlines() if line.startswith("kubectl conveyor why "))
    name, request_id = command.removeprefix("kubectl conveyor ").split()
    assert name == "why"
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}", headers={"X-Request-Id": request_id}):
            pass
    assert await why(stack, request_id) == 0
    assert capsys.readouterr().out.startswith(f"{stack.key} answered {request_id} with 200 in ")


async def test_each_service_that_had_the_id_has_a_sentence(
    stack: Stack, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    await asyncio.to_thread(stack.cluster.apply_service, "other")
    await stack.apply_service()  # waits until the gateway has seen both
    other = stack.key.replace("/qwen", "/other")
    for service in (stack.key, other):
        url = stack.completions.replace(stack.key, service)
        with contextlib.suppress(TimeoutError):
            await http.post(url, data=b"{}", headers={"X-Request-Id": "twice"}, timeout=aiohttp.ClientTimeout(0.5))
    lines: list[str] = []
    while len(lines) < 2:  # a receipt is kept a moment after its request has ended
        await why(stack, "twice")
        lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [other, stack.key]


async def test_a_gateway_that_does_not_answer_hides_no_receipt(
    stack: Stack, http: aiohttp.ClientSession, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        async with http.post(stack.completions, data=b"{}", headers={"X-Request-Id": "found"}):
            pass
    assert await why(stack, "found", "--gateway", "http://127.0.0.1:9") == 0
    assert capsys.readouterr().out.startswith(f"{stack.key} answered found with 200")


async def test_a_request_that_no_gateway_knows_is_an_error(stack: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert await why(stack, "never") == 1
    assert "no gateway keeps a receipt of never" in capsys.readouterr().err


def test_a_gateway_that_does_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why", "x", "--gateway", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.startswith("kubectl conveyor: http://127.0.0.1:9: ")


def test_a_namespace_without_gateways_is_named(aggregated: Aggregated, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--kubeconfig={aggregated.plane.kubeconfig}", "--system-namespace=nowhere"]
    assert main(["why", "x", *flags]) == 1
    assert "no gateway runs in the namespace nowhere" in capsys.readouterr().err
