"""Tests that failures of the API become the operator's errors."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException

from conveyor_http.server import open_port
from conveyor_operator.cluster import Cluster, translate
from conveyor_operator.errors import ApiError, Conflict, Refused, Unavailable
from conveyor_operator.kinds import DEPLOYMENT
from conveyor_operator.metrics import Metrics
from conveyor_process.listening import close_port


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
    """Connect to a server that answers every call with this response."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    accepting = open_port(runner, "127.0.0.1", 0)
    configuration = client.Configuration()
    configuration.host = f"http://127.0.0.1:{accepting.port}"
    try:
        async with Cluster(configuration, Metrics()) as cluster:
            yield cluster
    finally:
        await close_port(accepting)
        await runner.cleanup()


async def test_an_object_that_is_nested_too_deeply_is_refused() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text='{"a":' * 5000 + "1" + "}" * 5000, content_type="application/json")

    async with connected(answer) as cluster:
        with pytest.raises(Refused, match="nested too deeply"):
            await cluster.get(DEPLOYMENT, "default", "x")
