"""The pages that the gateway answers itself."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.builders import make_directory, make_known_service
from tests.gateway.engine_servers import SlowEngine, answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_gateway import __version__
from conveyor_gateway.answering.models import build_model_list


async def get(http: aiohttp.ClientSession, url: str) -> tuple[int, Any]:
    async with http.get(url) as answer:
        return answer.status, json.loads(await answer.read())


async def test_the_root_lists_a_service_that_has_no_engine_and_its_path_lists_only_it(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name}, engine={"maxModelLen": 512})
    status, listed = await get(http, f"{gateway.url}/v1/models")
    assert (status, listed["object"]) == (200, "list")
    [found] = [model for model in listed["data"] if model["owned_by"] == stack.cluster.namespace]
    assert (found["id"], found["object"], found["max_model_len"]) == (own_name, "model", 512)
    assert found["created"] > 1_700_000_000
    assert await get(http, f"{stack.url}/models") == (200, {"object": "list", "data": [found]})


async def test_one_model_is_found_by_each_of_its_names(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    assert (await get(http, f"{gateway.url}/v1/models/{stack.key}"))[1]["id"] == stack.key
    assert (await get(http, f"{stack.url}/models/qwen"))[1]["id"] == "qwen"
    status, body = await get(http, f"{stack.url}/models/unserved")
    assert (status, body["error"]["message"]) == (404, f"{stack.key} serves the model 'qwen'")
    assert (await get(http, f"{gateway.url}/v1/models/unserved"))[0] == 404


def test_the_model_list_names_each_service_so_that_the_root_finds_it() -> None:
    directory = make_directory(
        make_known_service("a/one", "same"), make_known_service("b/two", "same"), make_known_service("b/three")
    )
    assert [model["id"] for model in build_model_list(None, directory)["data"]] == ["same", "three", "b/two"]
    assert [model["id"] for model in build_model_list("a/one", directory)["data"]] == ["same"]


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "path_not_found"),
        ("POST", "/v1/rerank", 404, "path_not_found"),
        ("POST", "/nowhere/nobody/v1/completions", 404, "service_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("OPTIONS", "/v1/models", 405, "method_not_allowed"),
        ("HEAD", "/v1/models", 405, None),
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


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
async def test_probes_are_on_both_ports(gateway: GatewayProcess, http: aiohttp.ClientSession, path: str) -> None:
    for port in (gateway.port, gateway.admin_port):
        async with http.get(f"http://127.0.0.1:{port}{path}") as answer:
            assert (answer.status, await answer.text()) == (200, "ok\n")


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_the_root_says_of_the_gateway_that_it_answers_and_which_it_is(
    gateway: GatewayProcess, http: aiohttp.ClientSession, base: str
) -> None:
    for page in ("health", "ping"):
        assert await get(http, f"{gateway.url}{base}/{page}") == (200, {"status": "ready"})
    assert await get(http, f"{gateway.url}{base}/version") == (200, {"version": __version__})


@pytest.mark.parametrize("base", ["", "/v1"])
async def test_a_service_says_by_one_of_its_engines_that_it_answers(
    stack: Stack, http: aiohttp.ClientSession, base: str
) -> None:
    url = f"{stack.gateway.url}/{stack.key}{base}"
    assert (await get(http, f"{url}/health"))[1]["error"]["code"] == "no_engine"
    assert await get(http, f"{url}/version") == (200, {"version": __version__})
    async with (
        running_engine(answering(web.json_response, data={"status": "draining"}, status=503)) as leaving,
        running_engine(answering(web.json_response, data={"from": "the engine"})) as engine,
    ):
        await stack.add_engine(leaving.port)
        status, body = await get(http, f"{url}/health")
        assert (status, body["error"]["code"]) == (503, "engines_not_ready")
        await stack.add_engine(engine.port)
        for page in ("health", "ping", "version"):
            assert await get(http, f"{url}/{page}") == (200, {"from": "the engine"})
        async with http.get(
            f"{stack.gateway.url}{base}/health", headers={"Host": f"qwen.{stack.cluster.namespace}"}
        ) as a:
            assert await a.json() == {"from": "the engine"}
    assert {request.path for request, _ in engine.requests} == {"/health", "/ping", "/version"}
    assert stack.demand()["in_flight"] == 0


async def test_however_many_ask_whether_a_service_answers_its_engine_is_asked_once(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        asking = [asyncio.create_task(get(http, f"{stack.gateway.url}/{stack.key}/health")) for _ in range(30)]
        await stack.wait(lambda: slow.running > 0)
        slow.gate.set()
        assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert slow.most_running == 1


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/nothing", 404), ("POST", "/demand", 405)])
async def test_the_admin_port_has_only_its_pages(
    gateway: GatewayProcess, http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, f"http://127.0.0.1:{gateway.admin_port}{path}") as answer:
        assert answer.status == status


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
