"""Failures of the API as errors of ours."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from conveyor_operator.cluster import Cluster, translate
from conveyor_operator.errors import ApiError, Conflict, Refused, Unavailable
from conveyor_operator.kinds import DEPLOYMENT, SECRET
from conveyor_operator.metrics import Metrics


def failure(status: int, body: str = "", **headers: str) -> ApiException:
    error = ApiException(status=status, reason="Some Reason")
    error.body, error.headers = body, headers
    return error


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (403, Refused), (404, Refused), (409, Conflict), (422, Refused), (401, Unavailable),
     (429, Unavailable), (500, Unavailable), (503, Unavailable), (504, Unavailable)],
)  # fmt: skip
def test_a_status_becomes_the_error_that_says_what_to_do(status: int, kind: type[ApiError]) -> None:
    assert type(translate(failure(status))) is kind


def test_the_api_servers_own_sentence_is_kept() -> None:
    body = json.dumps({"kind": "Status", "reason": "Invalid", "message": "spec.x: Invalid value"})
    error = translate(failure(422, body))
    assert (error.status, error.reason, error.message) == (422, "Invalid", "spec.x: Invalid value")


def test_words_that_are_no_status_are_kept_as_they_are() -> None:
    error = translate(failure(502, "<html>bad gateway</html>"))
    assert (error.reason, error.message) == ("Some Reason", "<html>bad gateway</html>")


def test_a_retry_after_is_read() -> None:
    error = translate(failure(429, **{"Retry-After": "7"}))
    assert isinstance(error, Unavailable)
    assert error.retry_after_seconds == 7


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    configuration = client.Configuration()
    configuration.host = "http://127.0.0.1:1"
    async with Cluster(configuration, Metrics()) as cluster:
        with pytest.raises(Unavailable, match="/apis/apps/v1/namespaces/default/deployments/x"):
            await cluster.get(DEPLOYMENT, "default", "x")


@asynccontextmanager
async def connected(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Cluster]:
    """To a server that answers every call with that."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Cluster(configuration, Metrics()) as cluster:
            yield cluster
    finally:
        await runner.cleanup()


async def test_a_followed_object_is_listed_again_when_its_version_is_too_old() -> None:
    """As the API server answers a watch from a version that it has forgotten."""
    lists = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal lists
        if "watch" in request.query:
            gone = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "metadata": {}}}
            return web.Response(text=json.dumps(gone) + "\n")
        lists += 1
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": [{"metadata": {"name": str(lists)}}]})

    seen = []
    async with connected(answer) as cluster:
        async for found in cluster.follow(SECRET, "default", "x"):
            assert found is not None
            seen.append(found["metadata"]["name"])
            if len(seen) == 3:
                break
    assert seen == ["1", "2", "3"]


async def test_an_object_that_is_nested_too_deeply_is_refused() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text='{"a":' * 5000 + "1" + "}" * 5000, content_type="application/json")

    async with connected(answer) as cluster:
        with pytest.raises(Refused, match="nested too deeply"):
            await cluster.get(DEPLOYMENT, "default", "x")


@pytest.mark.parametrize("text", ['{"type": "MODI', f'{{"type": "{"x" * (5 << 20)}"}}\n'], ids=["half", "too long"])
async def test_a_watch_whose_line_cannot_be_read_is_unavailable(text: str) -> None:
    """A proxy may end a stream cleanly in the middle of an event."""

    async def answer(request: web.Request) -> web.Response:
        if "watch" in request.query:
            return web.Response(text=text)
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": []})

    async with connected(answer) as cluster:
        found = cluster.follow(SECRET, "default", "x")
        assert await anext(found) is None
        with pytest.raises(Unavailable, match="watch of secrets"):
            await anext(found)
