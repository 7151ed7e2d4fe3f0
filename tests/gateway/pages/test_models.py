"""Tests the list of models and the page of each model."""

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import pytest
from tests.gateway.builders import make_directory, make_known_service
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get

from conveyor_api.endpoints import EndpointKind
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.listening.listener import Listener
from conveyor_gateway.pages.models import (
    Model,
    build_model_list,
    encode_model_list,
    find_model_page,
    send_model_list,
)
from conveyor_gateway.routing import Route
from conveyor_gateway.watching.catalog import Directory, Service
from conveyor_gateway.watching.view import View


async def test_the_root_lists_a_listed_service_without_an_engine_and_its_path_lists_only_it(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    await stack.apply_service(
        model={"uri": "hf://org/model", "name": own_name}, engine={"maxModelLen": 512}, listed=True
    )
    await stack.claim_name(own_name)
    status, listed = await get(http, f"{gateway.url}/v1/models")
    assert (status, listed["object"]) == (200, "list")
    [found] = [model for model in listed["data"] if model["owned_by"] == stack.cluster.namespace]
    assert (found["id"], found["object"], found["max_model_len"]) == (own_name, "model", 512)
    assert found["root"] == own_name, "vLLM's load generator reads it"
    assert found["created"] > 1_700_000_000
    assert await get(http, f"{stack.url}/models") == (200, {"object": "list", "data": [found]})


async def test_one_model_is_found_by_each_of_its_names(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name}, listed=True)
    await stack.claim_name(own_name)
    for name in (stack.key, own_name):
        assert (await get(http, f"{gateway.url}/v1/models/{name}"))[1]["id"] == name
    assert (await get(http, f"{stack.url}/models/{own_name}"))[1]["id"] == own_name
    status, body = await get(http, f"{stack.url}/models/unserved")
    assert (status, body["error"]["message"]) == (404, f"{stack.key} serves the model {own_name!r}")


async def test_the_root_answers_alike_for_a_model_that_is_not_listed_and_for_one_that_is_not_there(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    """The cases: held but not listed; served but held by nobody; another service's `namespace/name`; absent."""
    own_name, unclaimed = (f"{word}-of-{stack.cluster.namespace}" for word in ("model", "other"))
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name})
    await stack.claim_name(own_name)
    await asyncio.to_thread(stack.cluster.apply_service, "more", model={"uri": "hf://org/model", "name": unclaimed})
    await stack.wait(lambda: gateway.knows_model(f"{stack.cluster.namespace}/more"))
    answers = []
    for name in (own_name, unclaimed, stack.key, "absent", f"{stack.cluster.namespace}/absent"):
        async with http.get(f"{gateway.url}/v1/models/{name}") as answer:
            headers = {key: value for key, value in answer.headers.items() if key not in ("X-Request-ID", "Date")}
            headers["Content-Length"] = str(int(headers["Content-Length"]) - len(name))
            answers.append((answer.status, headers, (await answer.text()).replace(name, "...")))
    assert answers == [answers[0]] * len(answers)
    assert answers[0][0] == 404
    assert stack.cluster.namespace not in str((await get(http, f"{gateway.url}/v1/models"))[1])
    assert gateway.knows_model(own_name), "who knows the name may use it"
    assert not gateway.knows_model(unclaimed)


async def test_a_gateway_of_one_team_lists_all(kubeconfig: Path, stack: Stack, http: aiohttp.ClientSession) -> None:
    with GatewayProcess(kubeconfig, "--root-models=All", f"--watch-namespaces={stack.cluster.namespace}") as gateway:
        listed = (await get(http, f"{gateway.url}/v1/models"))[1]["data"]
        assert [model["id"] for model in listed] == [stack.key]
        assert (await get(http, f"{gateway.url}/v1/models/{stack.key}"))[0] == 200


def list_models(directory: Directory, lists_all: bool = False) -> list[str]:
    return [model["id"] for model in json.loads(b"".join(encode_model_list(View(directory), lists_all)))["data"]]


def test_a_piece_of_the_list_has_few_models() -> None:
    adapters = tuple(f"a{number}" for number in range(16))
    directory = make_directory(*(make_known_service(f"team/s{number}", adapters=adapters) for number in range(100)))
    pieces = list(encode_model_list(View(directory), lists_all=False))
    assert max(piece.count(b'"owned_by"') for piece in pieces) <= 100
    assert len(list_models(directory)) == 1_700


def test_the_model_list_names_each_service_so_that_the_root_finds_it() -> None:
    directory = make_directory(
        make_known_service("a/one", "same"),
        make_known_service("b/two", "same"),
        make_known_service("b/three"),
        make_known_service("b/unlisted", listed=False),
        same="a",
        three="b",
    )
    assert list_models(directory) == ["same", "three", "b/two"]
    assert list_models(directory, lists_all=True) == ["same", "three", "b/two", "b/unlisted"]
    assert [model["id"] for model in build_model_list(directory.services["a/one"])["data"]] == ["same"]
    directory.remove("b/three")
    assert list_models(directory) == ["same", "b/two"]
    directory.put(make_known_service("b/two", "same", listed=False))
    assert list_models(directory) == ["same"]
    assert list_models(make_directory()) == []


def test_adapters_are_listed_as_models_with_their_parent() -> None:
    directory = make_directory(
        make_known_service("a/one", "qwen", adapters=("sql", "chat"), max_model_len=512),
        make_known_service("b/two", "qwen", adapters=("sql",)),
        make_known_service("b/hidden", listed=False, adapters=("sql",)),
        qwen="a",
        hidden="b",
    )
    listed = json.loads(b"".join(encode_model_list(View(directory), lists_all=False)))["data"]
    assert [(model["id"], model["parent"]) for model in listed] == [
        ("qwen", None),
        ("qwen:sql", "qwen"),
        ("qwen:chat", "qwen"),
        ("b/two", None),
        ("b/two:sql", "b/two"),
    ]
    assert listed[1] == listed[0] | {"id": "qwen:sql", "root": "qwen:sql", "parent": "qwen"}
    own = build_model_list(directory.services["b/two"])["data"]
    assert [(model["id"], model["parent"]) for model in own] == [("qwen", None), ("qwen:sql", "qwen")]

    def find(model: str, service: str | None = None, lists_all: bool = False) -> Model:
        return find_model_page(Route(EndpointKind.GET_MODEL, service, model=model), View(directory), lists_all)

    assert [find(model["id"]) for model in listed] == listed
    assert [find(model["id"], "b/two") for model in own] == own
    assert find("a/one:sql") == listed[1] | {"id": "a/one:sql", "root": "a/one:sql", "parent": "a/one"}
    assert find("hidden:sql", lists_all=True)["parent"] == "hidden"
    for model, service in (("hidden:sql", None), ("qwen:other", None), ("b/two:sql", "b/two")):
        with pytest.raises(GatewayError) as caught:
            find(model, service)
        assert caught.value.code == "model_not_found"


def test_services_that_come_and_go_while_the_list_is_read_leave_it_whole() -> None:
    keys = [f"a/s{number:03}" for number in range(300)]
    directory = make_directory(*map(make_known_service, keys))
    pieces = encode_model_list(View(directory), lists_all=False)
    read = [next(pieces), next(pieces)]
    directory.remove(keys[50])
    directory.remove(keys[250])
    directory.put(make_known_service("a/new"))
    listed = [model["id"] for model in json.loads(b"".join([*read, *pieces]))["data"]]
    assert listed == [key for key in keys if key != keys[250]]


async def test_clients_that_do_not_read_the_list_cost_the_same_however_many_services_there_are() -> None:
    calls = []

    class Counted(Directory):
        def list_after(self, key: str, count: int, lists_all: bool) -> list[Service]:
            calls.append(key)
            return super().list_after(key, count, lists_all)

    directory = Counted()
    for number in range(30_000):
        directory.put(make_known_service(f"a/{number:0200}"))
    listener = Listener(
        lambda request: send_model_list(request, View(directory), lists_all=False), "127.0.0.1", 0, max_connections=8
    )
    await listener.open()
    try:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", listener.port))
            client.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            before = 0
            while len(calls) > before or not calls:
                before = len(calls)
                await asyncio.sleep(0.2)
            assert len(calls) < 250, "the kernel's buffers take some of the 300 pieces"
    finally:
        await listener.close()
