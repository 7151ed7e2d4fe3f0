"""Tests that messages to clients are only about the API, without administrators' commands or other namespaces."""

import ast
import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import REPOSITORY, GatewayProcess
from tests.gateway.stack import Stack

from e2e.cluster.api import Api, wait_until

_FOR_ADMINISTRATORS = ("kubectl", "helm ", "infsvc", "InferenceService")
_SPOKEN = [
    *(REPOSITORY / "gateway" / "conveyor_gateway").rglob("*.py"),
    *(REPOSITORY / "engine" / "conveyor_engine" / "serving").rglob("*.py"),
    REPOSITORY / "engine" / "conveyor_engine" / "errors.py",
]
_FOR_LOGS = {"settings.py", "catalog.py"}  # flags, and what is logged of objects that cannot be read


def find_texts(file: Path) -> set[str]:
    """Return all texts of a program, which are its string literals without the docstrings."""
    tree = ast.parse(file.read_text())
    lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in lone]
    return {node.value for node in constants if isinstance(node.value, str)}


def test_no_message_speaks_of_what_only_administrators_know() -> None:
    texts = {text for file in _SPOKEN if file.name not in _FOR_LOGS for text in find_texts(file)}
    assert len(texts) > 500
    assert not [text for text in texts if any(word in text for word in _FOR_ADMINISTRATORS)]


@pytest.fixture
async def own_name(stack: Stack) -> str:
    """The served name of the service. A client of the root knows only this name."""
    name = f"model-{stack.cluster.namespace.removeprefix('test-')}"
    await stack.apply_service(model={"uri": "hf://org/model", "name": name}, queue={"timeout": "1s", "maxRequests": 1})
    await stack.claim_name(name)
    return name


async def send(gateway: GatewayProcess, http: aiohttp.ClientSession, model: str, **headers: str) -> tuple[str, str]:
    """Send a request. Returns the code of the error, and all that the client got."""
    url, body = f"{gateway.url}/v1/completions", json.dumps({"model": model, "prompt": "x"})
    async with http.post(url, data=body, headers={key.replace("_", "-"): text for key, text in headers.items()}) as got:
        text = await got.text()
        return json.loads(text)["error"]["code"], f"{got.headers} {text}"


async def break_off(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_a_client_of_the_root_never_reads_the_namespace_of_its_service(
    gateway: GatewayProcess, stack: Stack, own_name: str, http: aiohttp.ClientSession
) -> None:
    got = [await send(gateway, http, own_name, X_Request_Timeout_Seconds="0.05")]
    waiting = [asyncio.create_task(send(gateway, http, own_name)) for _ in range(4)]
    got += await asyncio.gather(*waiting)
    async with running_engine(break_off) as one, running_engine(break_off) as two:
        for engine in (one, two):
            await stack.add_engine(engine.port)
        got.append(await send(gateway, http, own_name))
        for engine in (one, two):
            await stack.set_engine_ready(engine.port, ready=False)
    async with running_engine(answering(web.json_response, data={}, status=500)) as engine:
        await stack.add_engine(engine.port)
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name}, queue={"timeout": "1h"})
    await stack.set_engine_ready(engine.port, ready=False)
    last = asyncio.create_task(send(gateway, http, own_name))
    await stack.wait_demand(in_flight=1)
    await asyncio.to_thread(stack.cluster.delete_service, "qwen")
    got.append(await last)
    got.append(await send(gateway, http, own_name))
    codes = {"deadline_exceeded", "queue_timeout", "queue_full", "engine_lost", "service_deleted", "model_not_found"}
    assert {code for code, _ in got} == codes
    assert not [text for _, text in got if stack.cluster.namespace in text]


async def test_a_gateway_that_is_not_ready_names_no_namespace(
    kubeconfig: Path, crd: Api, http: aiohttp.ClientSession
) -> None:
    gateway = GatewayProcess(kubeconfig, "--watch-namespaces=secret-team", "--system-namespace=nobodys")
    try:
        with pytest.raises(TimeoutError):  # no operator has claimed the names of that installation
            gateway.start(timeout_seconds=0)
        for path in ("/health", "/readyz", "/v1/models"):
            async with http.get(f"{gateway.url}{path}") as answer:
                assert answer.status == 503
                assert "secret-team" not in await answer.text()
        wait_until(
            "it says what it waits for",
            lambda: "waiting for the operator, " in gateway.admin("/readyz")[1],
        )
    finally:
        gateway.kill()
