"""Tests that the gateway's client understands the engine's error responses."""

import pytest
from aiohttp import web
from multidict import CIMultiDict
from tests.gateway.builders import make_hold
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_engine.errors import (
    DeadlineExceeded,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
    UnknownModel,
)
from conveyor_engine.serving.http.failures import failure_response
from conveyor_gateway.engines.exchange import (
    EngineAnswer,
    EngineFull,
    EngineIsBehind,
    EngineLost,
    EngineRefused,
    EngineRequest,
)
from conveyor_gateway.engines.session import EngineSession


async def send(error: RequestError, coming: str = "") -> EngineAnswer:
    """Return how the gateway understands an engine's response with this error. coming: a model of newer engines."""
    response = failure_response(error)
    headers = {name: text for name, text in response.headers.items() if name != "content-length"}
    handle = answering(web.Response, status=response.status_code, body=bytes(response.body), headers=headers)
    client = EngineSession()
    try:
        async with running_engine(handle) as engine:
            request = EngineRequest("/v1/completions", CIMultiDict(), b"{}", make_hold(), lambda model: model == coming)
            return await client.send(f"{own_address()}:{engine.port}", request, 10)
    finally:
        await client.close()


@pytest.mark.parametrize(
    ("error", "means"),
    [(Overloaded(""), EngineFull), (Unavailable(""), EngineRefused), (EngineDead(""), EngineLost)],
)
async def test_an_engine_that_cannot_sends_the_request_back(error: RequestError, means: type[Exception]) -> None:
    with pytest.raises(means) as caught:
        await send(error)
    assert caught.type is means


@pytest.mark.parametrize("error", [InvalidRequest(""), GenerationFailed(""), DeadlineExceeded("")])
async def test_an_engines_verdict_on_a_request_is_the_clients(error: RequestError) -> None:
    assert (await send(error)).status == failure_response(error).status_code


@pytest.mark.parametrize("model", ["qwen:sql", "Qwen/Qwen3 8B", "千问:é\n"])
async def test_an_engine_without_a_model_that_a_rollout_brings_sends_the_request_back(model: str) -> None:
    with pytest.raises(EngineIsBehind):
        await send(UnknownModel("", model=model), coming=model)
    assert (await send(UnknownModel("", model=model), coming="another")).status == 404


async def test_a_name_that_no_service_can_have_is_not_sent() -> None:
    for model in ("", "x" * 1001, "\ud800"):
        assert (await send(UnknownModel("", model=model), coming=model)).status == 404
