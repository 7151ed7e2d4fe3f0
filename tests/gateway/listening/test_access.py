"""Tests a gateway process with services that need a key: who gets what, and where a key never goes."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, get, post

from conveyor_api import names
from e2e.cluster.api import Api

OK = answering(web.Response, text="{}", content_type="application/json")


class Keys:
    """The APIKeys of a namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self._path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"

    def apply(self, name: str = "ci", *keys: str, **spec: Any) -> None:
        self._api.apply(f"{self._path}/{name}", make_api_key(self._namespace, name, *keys, **spec))

    def delete(self, name: str = "ci") -> None:
        self._api.delete(f"{self._path}/{name}")


@pytest.fixture
def keys(crd: Api, cluster: Cluster) -> Iterator[Keys]:
    keys = Keys(crd, cluster.namespace)
    yield keys
    keys.delete("")


@pytest.fixture
async def guarded(stack: Stack) -> AsyncIterator[Stack]:
    """The service `qwen`, which needs a key. It ends before another test uses the gateway."""
    await stack.apply_service(access={"mode": "Required"})
    yield stack
    await asyncio.to_thread(stack.cluster.delete_service, "qwen")
    await stack.wait(lambda: stack.gateway.demand(stack.key) is None)


async def wait_status(http: aiohttp.ClientSession, url: str, key: str, status: int) -> float:
    """Repeat a request until it has this status. Returns how long it took in seconds."""
    began = time.monotonic()
    while (await post(http, url, Authorization=f"Bearer {key}"))[0] != status:
        assert time.monotonic() - began < 30, status
        await asyncio.sleep(0.02)
    return time.monotonic() - began


async def test_only_a_key_opens_the_service_and_a_revoked_one_closes_it_within_two_seconds(
    guarded: Stack, keys: Keys, http: aiohttp.ClientSession
) -> None:
    key = make_key(guarded.cluster.namespace)
    async with running_engine(OK) as engine:
        await guarded.add_engine(engine.port)
        status, body, headers = await post(http, guarded.completions)
        assert (status, body["error"]["code"], headers["WWW-Authenticate"]) == (401, "missing_api_key", "Bearer")
        await asyncio.to_thread(keys.apply)
        await wait_status(http, guarded.completions, key, 200)
        assert (await post(http, guarded.completions, x_api_key=key))[0] == 200
        assert (await post(http, f"{guarded.completions}?api_key={key}"))[0] == 401
        await asyncio.to_thread(keys.delete)
        assert await wait_status(http, guarded.completions, key, 401) < 2
        status, body, _ = await post(http, guarded.completions, Authorization=f"Bearer {key}")
        assert (status, body["error"]["type"], body["error"]["code"]) == (
            401,
            "invalid_request_error",
            "invalid_api_key",
        )


async def test_a_key_reaches_neither_an_engine_nor_a_log_nor_an_answer(
    gateway: GatewayProcess, guarded: Stack, keys: Keys, http: aiohttp.ClientSession
) -> None:
    key, unknown = make_key(guarded.cluster.namespace), make_key(guarded.cluster.namespace, 7)
    await asyncio.to_thread(keys.apply, owner="ml")
    async with running_engine(OK) as engine:
        await guarded.add_engine(engine.port)
        await wait_status(http, guarded.completions, key, 200)
        answers = []
        for sent in (key, unknown):
            for headers in ({"Authorization": f"Bearer {sent}"}, {"x_api_key": sent}):
                answers += [await post(http, guarded.completions, **headers)]
                answers += [await post(http, f"{guarded.url}/nonsense?api_key={sent}", **headers)]
                answers += [await post(http, f"{gateway.url}/v1/completions?key={sent}", b"no JSON", **headers)]
        assert {status for status, *_ in answers} == {200, 400, 401, 404}
        requests = [str(dict(request.headers)) + str(request.rel_url) for request, _ in engine.requests]
    log = "\n".join(gateway.log)
    assert f"client={guarded.cluster.namespace}/ci" in log, "the key's name is what a log has"
    for sent in (key, unknown):
        assert sent not in log
        assert sent not in "".join(requests)
        assert sent not in str(answers)


async def test_a_key_of_another_namespace_gets_what_a_service_that_does_not_exist_gives(
    guarded: Stack, keys: Keys, http: aiohttp.ClientSession
) -> None:
    key = make_key(guarded.cluster.namespace)
    await asyncio.to_thread(keys.apply, services=["other"])
    await wait_status(http, guarded.completions, key, 404)
    absent = guarded.completions.replace("/qwen/", "/none/")
    hidden = await post(http, guarded.completions, Authorization=f"Bearer {key}")
    missing = await post(http, absent, Authorization=f"Bearer {key}")
    assert json.dumps(hidden[1]).replace("qwen", "none") == json.dumps(missing[1])
    assert (hidden[0], hidden[1]["error"]["code"]) == (404, "service_not_found")
    for path in ("health", "openapi.json", "v1/models", "ping", "v1/nonsense"):
        url = guarded.completions.removesuffix("v1/completions") + path
        statuses = [(await get(http, each))[0] for each in (url, url.replace("/qwen/", "/none/"))]
        assert statuses == [401, 401]


async def test_errors_have_the_form_of_the_path_s_api(guarded: Stack, http: aiohttp.ClientSession) -> None:
    status, body, _ = await post(http, f"{guarded.url}/messages", x_api_key="sk-ant-unknown")
    assert (status, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")


async def test_each_caller_lists_its_own_models(
    gateway: GatewayProcess, guarded: Stack, keys: Keys, http: aiohttp.ClientSession
) -> None:
    key = make_key(guarded.cluster.namespace)
    await asyncio.to_thread(keys.apply)
    await wait_status(http, f"{guarded.url}/nonsense", key, 404)

    async def list_models(**headers: str) -> list[str]:
        async with http.get(f"{gateway.url}/v1/models", headers=headers) as answer:
            return [model["id"] for model in (await answer.json()).get("data", ())]

    assert guarded.key in await list_models(Authorization=f"Bearer {key}")
    assert guarded.key not in await list_models()


@pytest.mark.parametrize(("mode", "status"), [("Required", 200), ("Enforced", 401)])
async def test_the_gateway_s_setting_is_the_default_and_may_be_enforced(
    kubeconfig: Path, stack: Stack, http: aiohttp.ClientSession, mode: str, status: int
) -> None:
    flags = (f"--access={mode}", f"--watch-namespaces={stack.cluster.namespace}")
    async with running_engine(OK) as engine:
        await stack.add_engine(engine.port)
        with GatewayProcess(kubeconfig, *flags) as own:
            url = f"{own.url}/{stack.key}/v1/completions"
            assert (await post(http, url))[0] == 401
            root = await post(http, f"{own.url}/v1/completions", b"no JSON")
            assert root[1]["error"]["code"] == "missing_api_key", "the body is not even read"
            await stack.apply_service(access={"mode": "Open"})
            deadline = time.monotonic() + 30
            while (found := (await post(http, url))[0]) != status:
                assert time.monotonic() < deadline, found
                await asyncio.sleep(0.05)
