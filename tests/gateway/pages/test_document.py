"""Tests that the document at a service's /openapi.json describes the gateway's answers."""

import asyncio
import json
import re
import tracemalloc
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web
from jsonschema import Draft202012Validator
from tests.gateway.engine_servers import Engine, answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack
from tests.openapi import find_references

from conveyor_api.endpoints import ENDPOINTS, EndpointKind
from conveyor_engine.serving.http.openapi import build_document as build_engine_document
from conveyor_gateway.errors import Code
from conveyor_gateway.pages.document import MAX_BYTES, OUTLINE, build_document, write_document

Json = dict[str, Any]
OF_ENGINE = build_engine_document()
DOCUMENT: Json = json.loads(build_document(json.dumps(OF_ENGINE).encode(), "default/qwen", "/default/qwen"))
COMPLETIONS = "/v1/completions"
# Of requests that are not in the document of a service: other paths, other methods, and those of the root.
ELSEWHERE = {
    Code.RECEIPT_NOT_FOUND,
    Code.INVALID_FORM,
    Code.NO_MODEL,
    Code.HOST_WITHOUT_NAMESPACE,
    Code.PATH_NOT_FOUND,
    Code.METHOD_NOT_ALLOWED,
    Code.NOT_READY,
}


def find_responses(document: Json, path: str, method: str = "get") -> Json:
    responses: Json = document["paths"][path][method]["responses"]
    return responses


def find_codes(response: Json) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`:", response["description"].partition("By the gateway")[2]))


def check(document: Json, path: str, status: int, body: Json, method: str = "get") -> None:
    """Check that the document has this answer: its schema and, for the gateway's own error, its code."""
    response = find_responses(document, path, method)[str(status)]
    schema = response["content"]["application/json"]["schema"]
    Draft202012Validator(schema | {"components": document["components"]}).validate(body)
    if status != 200 and body["error"]["code"] in set(Code):
        assert body["error"]["code"] in find_codes(response)


def test_it_has_every_path_of_the_catalogue_and_every_answer_that_they_may_get() -> None:
    documented = {(method.upper(), path) for path, of in DOCUMENT["paths"].items() for method in of}
    assert documented == {(endpoint.method, endpoint.path) for endpoint in ENDPOINTS}
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    assert set(find_references(DOCUMENT)) <= {
        f"#/components/schemas/{name}" for name in DOCUMENT["components"]["schemas"]
    }
    responses = [
        (status, response)
        for path, of in DOCUMENT["paths"].items()
        for method in of
        for status, response in find_responses(DOCUMENT, path, method).items()
    ]
    codes = {(status, code) for status, response in responses for code in find_codes(response)}
    assert codes == {(str(code.status), str(code)) for code in set(Code) - ELSEWHERE}


def test_without_an_engine_it_has_every_path_and_bodies_of_any_shape() -> None:
    document = json.loads(build_document(OUTLINE, "default/qwen", "/default/qwen"))
    assert {path: of.keys() for path, of in document["paths"].items()} == {
        path: of.keys() for path, of in DOCUMENT["paths"].items()
    }
    assert set(find_references(document)) <= {
        f"#/components/schemas/{name}" for name in document["components"]["schemas"]
    }
    operation = document["paths"][COMPLETIONS]["post"]
    assert operation["requestBody"]["content"]["application/json"]["schema"] == {"type": "object"}
    assert "No engine runs now" in operation["description"]
    assert "`queue_timeout`" in operation["responses"]["504"]["description"]


def test_what_the_gateway_keeps_back_of_an_engine_is_not_in_it() -> None:
    responses = find_responses(DOCUMENT, COMPLETIONS, "post")
    assert "engine_dead" in find_responses(OF_ENGINE, COMPLETIONS, "post")["502"]["description"]
    assert "engine_dead" not in responses["502"]["description"]
    assert "`generation_failed`" in responses["500"]["description"]


@pytest.mark.parametrize("page", ["", "[]", "{}", '{"openapi":"3.1.0","paths":[]}', '{"openapi":3}', "[" * 60_000])
def test_what_is_no_document_is_refused(page: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        build_document(page.encode(), "default/qwen", "")


def test_bytes_that_are_no_text_are_no_document() -> None:
    page = b'{"openapi":"3.1.0","paths":{"/v1/completions":{"post":{"summary":"\xff"}}}}'
    with pytest.raises(UnicodeDecodeError):
        build_document(page, "default/qwen", "")


def test_clients_that_share_a_page_share_the_document() -> None:
    page = json.dumps(OF_ENGINE).encode()
    first = write_document(page, "default/qwen", "/default/qwen")
    assert first is not None
    assert write_document(page, "default/qwen", "/default/qwen") is first
    assert write_document(page, "default/qwen", "") != first
    assert write_document(b"{}", "default/qwen", "") is None


@pytest.mark.parametrize("item", ["[]", '{"":0}', '"\u0080"'])
@pytest.mark.parametrize("where", ['"x"', '"responses":{"400":{"description"', '"responses":{"400":{"content"'])
def test_a_document_takes_a_few_times_its_bytes_whatever_is_in_it(item: str, where: str) -> None:
    begin = f'{{"openapi":"3.1.0","paths":{{"{COMPLETIONS}":{{"post":{{{where}:['
    end = "]" + "}" * (where.count("{") + 4)
    page = (begin + ",".join([item] * ((MAX_BYTES - 200) // (len(item) + 1))) + end).encode()
    tracemalloc.start()
    document = build_document(page, "default/qwen", "")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert COMPLETIONS in json.loads(document)["paths"]
    assert peak_bytes < 5 * MAX_BYTES


def test_what_the_gateway_does_not_know_of_a_document_is_stepped_over() -> None:
    """Only names that the gateway knows are used, however many the document has."""
    many = {str(number): {"post": 0} for number in range(20_000)}
    operation = {
        "responses": many | {"200": {"description": "ok"}, "400": {"content": many}},
        "servers": [{"url": "//x"}],
    }
    page = {
        "openapi": "3.1.0",
        "paths": many | {COMPLETIONS: {"post": operation}},
        "components": {"schemas": {"A": {}}},
    }
    document = json.loads(build_document(json.dumps(page).encode(), "default/qwen", ""))
    described = document["paths"][COMPLETIONS]["post"]
    of_engines = {
        endpoint.path for endpoint in ENDPOINTS if endpoint.kind in (EndpointKind.ENGINE, EndpointKind.ENGINE_PAGE)
    }
    others = of_engines - {COMPLETIONS}
    assert document["paths"].keys() == json.loads(build_document(OUTLINE, "q", ""))["paths"].keys() - others
    assert described["responses"].keys() <= {str(number) for number in range(200, 600)}
    assert described["responses"]["200"] == {"description": "ok"}
    assert described["responses"]["400"]["content"].keys() == {"application/json"}
    assert "servers" not in described
    assert {"A", "GatewayModel"} <= document["components"]["schemas"].keys()


def test_an_engine_that_says_little_or_nonsense_of_its_paths_has_what_the_gateway_says() -> None:
    paths = {
        COMPLETIONS: {"post": []},
        "/v1/chat/completions": {"post": {"responses": {"500": 1, "404": {"content": [], "description": [[]]}}}},
        "/v1/embeddings": [],
    }
    document = json.loads(build_document(json.dumps({"openapi": "3.0.2", "paths": paths}).encode(), "default/qwen", ""))
    assert COMPLETIONS not in document["paths"]
    assert find_codes(find_responses(document, "/v1/chat/completions", "post")["404"]) >= {"service_not_found"}
    assert document["servers"] == [{"url": "/"}]


async def answer_pages_only(request: web.Request) -> web.StreamResponse:
    if request.path == "/openapi.json":
        return web.json_response(OF_ENGINE)
    if request.method == "GET":
        return web.json_response({"status": "ready"})
    assert request.transport is not None
    request.transport.abort()
    raise ConnectionError


async def send(http: aiohttp.ClientSession, url: str, **options: Any) -> tuple[int, Json]:
    async with http.request(options.pop("method", "GET"), url, **options) as answer:
        return answer.status, json.loads(await answer.read())


@pytest.fixture
async def engine(stack: Stack) -> Any:
    async with running_engine(answer_pages_only) as engine:
        await stack.add_engine(engine.port)
        yield engine


async def test_its_base_is_that_by_which_the_client_came(
    stack: Stack, engine: Engine, http: aiohttp.ClientSession
) -> None:
    status, document = await send(http, f"{stack.gateway.url}/{stack.key}/openapi.json")
    assert (status, document["info"]["title"]) == (200, stack.key)
    assert document == DOCUMENT | {"info": document["info"], "servers": [{"url": f"/{stack.key}"}]}
    by_host = {"Host": f"qwen.{stack.cluster.namespace}"}
    _, document = await send(http, f"{stack.gateway.url}/openapi.json", headers=by_host)
    assert document["servers"] == [{"url": "/"}]
    assert stack.demand()["in_flight"] == 0


async def test_a_page_and_its_refusals_are_as_it_says(
    stack: Stack, engine: Engine, http: aiohttp.ClientSession
) -> None:
    base = f"{stack.gateway.url}/{stack.key}"
    for path in ("/v1/models", "/health", "/v1/ping", "/openapi.json"):
        status, body = await send(http, base + path)
        assert status == 200
        check(DOCUMENT, path, status, body)
    check(DOCUMENT, "/v1/models/{model}", *await send(http, f"{base}/v1/models/qwen"))
    refused = await send(http, f"{base}/v1/models/other")
    assert refused[1]["error"]["code"] == "model_not_found"
    check(DOCUMENT, "/v1/models/{model}", *refused)
    check(DOCUMENT, "/v1/models", *await send(http, f"{base}-none/v1/models"))


async def test_a_service_without_a_ready_engine_has_none(stack: Stack, http: aiohttp.ClientSession) -> None:
    for path in ("/openapi.json", "/health"):
        status, body = await send(http, f"{stack.gateway.url}/{stack.key}{path}")
        assert (status, body["error"]["code"]) == (503, "no_engine")
        check(DOCUMENT, path, status, body)
    assert stack.demand()["in_flight"] == 0


async def test_a_page_that_the_engine_builds_on_the_first_request_is_awaited(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    async def make(request: web.Request) -> web.Response:
        await asyncio.sleep(3)
        return web.json_response(OF_ENGINE)

    async with running_engine(make) as engine:
        await stack.add_engine(engine.port)
        status, document = await send(http, f"{stack.gateway.url}/{stack.key}/openapi.json")
    assert status == 200
    assert COMPLETIONS in document["paths"]


@pytest.mark.parametrize("text", ["{}", "x" * (MAX_BYTES + 1)])
async def test_an_engine_without_one_is_as_an_engine_that_does_not_answer(
    stack: Stack, http: aiohttp.ClientSession, text: str
) -> None:
    async with running_engine(answering(web.Response, text=text)) as engine:
        await stack.add_engine(engine.port)
        status, body = await send(http, f"{stack.gateway.url}/{stack.key}/openapi.json")
    assert (status, body["error"]["code"]) == (503, "engines_not_ready")
    check(DOCUMENT, "/openapi.json", status, body)


@pytest.mark.parametrize(
    ("code", "options"),
    [
        (Code.INVALID_TIMEOUT, {"headers": {"X-Request-Timeout-Seconds": "soon"}}),
        (Code.DEADLINE_EXCEEDED, {"headers": {"X-Request-Timeout-Seconds": "0.1"}}),
        (Code.REQUEST_TOO_LARGE, {"headers": {"Content-Length": str(1 << 30)}, "data": b""}),
        (Code.HEADERS_TOO_LARGE, {"headers": {"X-Long": "x" * 9_000}}),
    ],
    ids=str,
)
async def test_a_refusal_before_any_engine_is_as_it_says(
    stack: Stack, http: aiohttp.ClientSession, code: Code, options: Json
) -> None:
    status, body = await send(http, stack.completions, method="POST", **options)
    assert (status, body["error"]["code"]) == (code.status, code)
    check(DOCUMENT, COMPLETIONS, status, body, "post")


async def test_a_full_queue_and_one_that_nobody_serves_are_as_it_says(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    limits = {"maxRequests": 1, "timeout": "1s"}
    await stack.apply_service(model={"uri": "hf://org/model", "name": "limited"}, queue=limits)
    await stack.wait(lambda: b'"limited"' in urllib.request.urlopen(f"{stack.url}/models").read())
    answers = await asyncio.gather(*(send(http, stack.completions, method="POST") for _ in range(3)))
    assert {body["error"]["code"] for _, body in answers} == {"queue_full", "queue_timeout"}
    for status, body in answers:
        check(DOCUMENT, COMPLETIONS, status, body, "post")


async def test_engines_that_break_off_are_as_it_says(stack: Stack, engine: Engine, http: aiohttp.ClientSession) -> None:
    status, body = await send(http, stack.completions, method="POST")
    assert (status, body["error"]["code"]) == (502, "engine_lost")
    check(DOCUMENT, COMPLETIONS, status, body, "post")


async def test_it_is_fetched_only_as_far_as_there_is_memory(
    stack: Stack, engine: Engine, http: aiohttp.ClientSession, kubeconfig: Path
) -> None:
    with GatewayProcess(kubeconfig, "--max-held-bytes", "200000", "--max-request-bytes", "1000") as small:
        await stack.wait(lambda: small.demand(stack.key) is not None)
        status, body = await send(http, f"{small.url}/{stack.key}/openapi.json")
    assert (status, body["error"]["code"]) == (503, "gateway_memory_full")
    check(DOCUMENT, "/openapi.json", status, body)
    assert len(engine.requests) == 1
