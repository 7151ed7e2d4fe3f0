"""Tests the pages that say who used what, who waits and where the time of a request went.

A real API server and a real gateway show what they contain, and for whom."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import aiohttp
import msgspec
import pytest
from aiohttp import web
from tests.cli.insight.test_receipts import RECEIPT
from tests.console.process import ConsoleProcess, make_reader
from tests.console.test_console import HOSTILE
from tests.gateway.cluster import Cluster, own_address, publish_gateway
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess

from conveyor_api import names
from e2e.cluster.api import Api

BODY = {"prompt": "hello", "max_tokens": 5}
BOTH = ("inferenceservices", "apikeys")


@pytest.fixture
def usage(crd: Api, system_namespace: str, namespace: str) -> Iterator[str]:
    """The ConfigMap of the operator, with rows of the test's namespace. Yields the name of another namespace."""
    other, today = f"other-{uuid4().hex[:8]}", datetime.now(UTC).date()
    rows = [
        [f"{namespace}/qwen", f"{namespace}/ann", "", 3, 1000, 10, 2000, 4500.0],
        [f"{namespace}/qwen", "", "batch", 1, 30, 0, 20, 100.0],
        [f"{other}/secret", f"{other}/eve", "", 5, 50, 0, 60, 100.0],
        [f"{namespace}/qwen", f"proxy:{HOSTILE[:60]}", "", 1, 1, 0, 1, 0.0],
    ]
    old = [[f"{namespace}/qwen", f"{namespace}/old-key", "", 7, 70, 0, 80, 100.0]]
    path = f"/api/v1/namespaces/{system_namespace}/configmaps"
    data = {str(today): json.dumps({"0" * 16: rows}), str(today - timedelta(days=5)): json.dumps({"": old})}
    crd.create(path, {"metadata": {"name": names.USAGE_NAME}, "data": data})
    yield other
    crd.delete(f"{path}/{names.USAGE_NAME}")


def read_rows(page: str) -> list[list[str]]:
    """Return the texts of the cells of each row of usage."""
    rows = re.findall(r'<tr><th scope="row">.*?</tr>', page)
    return [re.findall(r"<t[hd][^>]*>(?:<a [^>]*>)?([^<]*)", row) for row in rows]


def test_a_team_sees_what_its_callers_used_and_nothing_of_others(
    console: ConsoleProcess, crd: Api, cluster: Cluster, usage: str
) -> None:
    token = make_reader(crd, cluster.namespace, resources=BOTH)
    key = f"{cluster.namespace}/ann"
    page = console.wait_for(key, token, "/usage")
    service = f"{cluster.namespace}/qwen"
    assert read_rows(page)[:2] == [
        [key, service, "3", "1,000", "10", "2,000", "4.5"],
        ["without a key", service, "1", "30", "0", "20", "0.1"],
    ]
    assert usage not in page
    assert "<img" not in page
    assert "old-key" not in page
    assert "old-key" in console.get("/usage?days=7", token).text
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    assert key in console.get(f"/services/{service}", token).text


def test_who_may_not_list_keys_sees_no_names_of_callers(
    console: ConsoleProcess, cluster: Cluster, usage: str, token: str
) -> None:
    page = console.wait_for(f"others of {cluster.namespace}", token, "/usage")
    assert f"{cluster.namespace}/ann" not in page
    assert "proxy:" not in page


def test_usage_that_cannot_be_read_is_said(
    console: ConsoleProcess, crd: Api, system_namespace: str, token: str, usage: str
) -> None:
    path = f"/api/v1/namespaces/{system_namespace}/configmaps/{names.USAGE_NAME}"
    day = str(datetime.now(UTC).date())
    changed = {"data": {day: '{"x": [[1]]}'}}
    crd.call("PATCH", path, changed, "application/merge-patch+json")
    console.wait_for("The usage cannot be read.", token, "/usage")


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_the_page_of_a_service_has_those_who_wait(
    console: ConsoleProcess,
    gateway: GatewayProcess,
    crd: Api,
    cluster: Cluster,
    token: str,
    http: aiohttp.ClientSession,
) -> None:
    namespace, service = cluster.namespace, f"{cluster.namespace}/qwen"
    keys = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/{namespace}/{names.API_KEY_PLURAL}"
    await asyncio.to_thread(crd.create, keys, make_api_key(namespace, "ann"))
    classes = [{"name": "online", "level": 0}, {"name": "batch", "level": 5}]
    await asyncio.to_thread(cluster.apply_service, "qwen", queue={"classes": classes})
    reads_keys = await asyncio.to_thread(make_reader, crd, namespace, "of-keys", BOTH)

    async def send(headers: dict[str, str]) -> None:
        while True:  # the gateway does not know the service and the key at once
            async with http.post(f"{gateway.url}/{service}/v1/completions", json=BODY, headers=headers) as answer:
                await answer.read()
            await asyncio.sleep(0.2)

    key = {"Authorization": f"Bearer {make_key(namespace)}", "X-Request-Class": "batch"}
    sending = [asyncio.create_task(send(headers)) for headers in (key, key, {})]
    try:
        page = f"/services/{service}"
        found = await asyncio.to_thread(console.wait_for, f"{namespace}/ann</td>", reads_keys, page)
        assert re.search(rf">{namespace}/ann</td><td data-label=\"Class\">batch</td>", found)
        await asyncio.to_thread(console.wait_for, "without a key</td>", reads_keys, page)
        other = await asyncio.to_thread(console.wait_for, f"others of {namespace}</td>", token, page)
        assert f"{namespace}/ann" not in other
    finally:
        for task in sending:
            task.cancel()
        await asyncio.gather(*sending, return_exceptions=True)
    await asyncio.to_thread(crd.delete, f"{keys}/ann")


async def test_where_a_request_s_time_went_is_told_to_who_may_see_its_service(
    console: ConsoleProcess,
    gateway: GatewayProcess,
    crd: Api,
    cluster: Cluster,
    token: str,
    http: aiohttp.ClientSession,
) -> None:
    service = f"{cluster.namespace}/qwen"
    await asyncio.to_thread(cluster.apply_service, "qwen", queue={"timeout": "1s"})
    await asyncio.to_thread(console.wait_for, "qwen", token)
    status = 404
    while status == 404:
        async with http.post(f"{gateway.url}/{service}/v1/completions", json=BODY) as answer:
            status, request_id = answer.status, answer.headers["X-Request-Id"]
    page = await asyncio.to_thread(console.get, f"/requests?id={request_id}", token)
    assert page.status == 200
    assert f"{service} ended {request_id} with {status}" in page.text
    assert re.search(r"It ended at \d\d:\d\d:\d\d UTC", page.text)
    elsewhere = f"other-{uuid4().hex[:8]}"
    await asyncio.to_thread(crd.create, "/api/v1/namespaces", {"metadata": {"name": elsewhere}})
    other = await asyncio.to_thread(make_reader, crd, elsewhere)
    for reader, asked in ((other, request_id), (token, "none"), (token, "%3Cimg%3E")):
        refused = await asyncio.to_thread(console.get, f"/requests?id={asked}", reader)
        assert refused.status == 404
        assert "No gateway has a receipt" in refused.text
        assert service not in refused.text
        assert "<img" not in refused.text


async def test_a_newer_receipt_of_another_namespace_with_the_same_id_hides_none(
    console: ConsoleProcess, crd: Api, system_namespace: str, cluster: Cluster, token: str
) -> None:
    """Clients choose ids, so those of another namespace can send the same one to another gateway."""
    runners, seen = [], f"{cluster.namespace}/qwen"
    for name, service, ended in (("older", seen, 1.0), ("newer", "hidden/secret", 2.0)):
        receipt = msgspec.json.encode([msgspec.structs.replace(RECEIPT, service=service, ended_unix=ended)])

        async def answer(_request: web.BaseRequest, receipt: bytes = receipt) -> web.StreamResponse:
            return web.Response(body=receipt)

        runner = web.ServerRunner(web.Server(answer))
        runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, own_address(), 0).start()
        await asyncio.to_thread(publish_gateway, crd, system_namespace, name, runner.addresses[0][1])
    page = await asyncio.to_thread(console.wait_for, seen, token, "/requests?id=same")
    assert "hidden" not in page
    for runner, name in zip(runners, ("older", "newer"), strict=True):
        path = f"/apis/discovery.k8s.io/v1/namespaces/{system_namespace}/endpointslices/{name}"
        await asyncio.to_thread(crd.delete, path)
        await runner.cleanup()
