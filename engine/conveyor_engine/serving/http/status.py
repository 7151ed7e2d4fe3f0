"""Serves models, probes, load, places, usage and metrics, for every task. None of these waits for the engine loop."""

import asyncio
import contextlib
import socket
from typing import Final, Literal

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from conveyor_engine import __version__
from conveyor_engine.errors import RequestError
from conveyor_engine.serving.engine_client import State
from conveyor_engine.serving.http.app_state import AppState, app_state
from conveyor_engine.serving.http.engine_response import client_left
from conveyor_engine.serving.http.reading import request_level
from conveyor_protocol.engine_pages import Load, Model, ModelList
from conveyor_protocol.request_headers import POD_HEADER

_END_SECONDS: Final = 2.0  # how long to wait for the end of a request whose client has left


class Status(msgspec.Struct):
    """The engine's state."""

    status: Literal["starting", "ready", "draining", "dead", "stuck"]


class Version(msgspec.Struct):
    """The engine's version, in vLLM's format."""

    version: str


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def list_models(request: Request) -> Response:
    """Respond to GET /v1/models."""
    state = app_state(request)
    adapters = [name for name, adapter in state.model.adapters.items() if adapter.number]
    return _json(ModelList(object="list", data=[_model(state, adapter) for adapter in ("", *adapters)]))


async def get_model(request: Request) -> Response:
    """Respond to GET /v1/models/{id}. Ids may contain slashes. Raises UnknownModel."""
    state = app_state(request)
    return _json(_model(state, state.model.find_adapter(request.path_params["model"])))


def _model(state: AppState, adapter: str) -> Model:
    """Describe the model with the adapter of this name; "": without an adapter."""
    facts, model = state.engine.facts, state.model
    root = model.adapters[adapter].directory if adapter else state.config.model
    context = facts.max_model_len if facts else None
    return {
        "id": model.full_name(adapter),
        "object": "model",
        "created": state.created,
        "owned_by": "conveyor",
        "root": root,
        "parent": model.name if adapter else None,
        "max_model_len": context,
    }


async def get_livez(request: Request) -> Response:
    """Respond with 200 while the engine process and the workers are alive and not stuck, also while the model loads.

    Otherwise respond with 503, so that the kubelet restarts the container.
    """
    state = app_state(request)
    return _json(Status(state.engine.state.value), 200 if is_alive(state) else 503)


async def get_readyz(request: Request) -> Response:
    """Respond with 200 while requests are accepted: the engine is warm, alive and not draining. Otherwise with 503.

    An engine whose adapters come from a file also waits until each of them is loaded or has failed once.

    The header with the pod's name shows a gateway that the address still belongs to the pod that it means.
    """
    state = app_state(request)
    answer = _json(Status(state.engine.state.value if is_alive(state) else "stuck"), 200 if is_ready(state) else 503)
    answer.headers[POD_HEADER] = socket.gethostname()
    return answer


def is_ready(state: AppState) -> bool:
    """Return whether requests are accepted."""
    is_settled = state.adapters is None or state.adapters.is_settled
    return state.engine.state is State.READY and is_settled and is_alive(state)


def is_alive(state: AppState) -> bool:
    """Return whether the engine process and the workers are alive and not stuck."""
    return state.engine.is_alive and state.workers.is_alive


async def get_version(_: Request) -> Response:
    """Respond to GET /version in vLLM's format."""
    return _json(Version(__version__))


async def get_load(request: Request) -> Response:
    """Respond to GET /load with the engine's load."""
    state = app_state(request)
    engine = state.engine
    load = Load(
        server_load=engine.stats.num_running + engine.num_waiting,
        running=engine.stats.num_running,
        waiting=engine.num_waiting,
        max_num_seqs=engine.facts.max_num_seqs if engine.facts else state.config.choose_num_seqs(),
        kv_cache_usage=round(engine.stats.kv_cache_usage, 4),
        carried=engine.stats.capacity,
        max_prompt_tokens=engine.stats.max_prompt_tokens,
        limit_reason=engine.stats.limit_reason,
        draining=engine.state is State.DRAINING,
        warm_up_seconds=engine.start_seconds.get("warm_up"),
    )
    return _json(load)


async def get_adapters(request: Request) -> Response:
    """Respond to GET /adapters with what has become of each adapter that may come and go, by name."""
    adapters = app_state(request).adapters
    return _json({} if adapters is None else adapters.report())


async def get_steps(request: Request) -> Response:
    """Respond to GET /steps with the engine's last steps."""
    return _json(app_state(request).metrics.steps.read())


async def request_place(request: Request) -> Response:
    """Respond to GET /place with 204 once a place is reserved for a request of this gateway.

    Raises Unavailable, Overloaded or InvalidRequest.
    """
    engine = app_state(request).engine
    engine.check_state()
    requesting = asyncio.create_task(engine.places.request(request_level(request) or 0))
    leaving = asyncio.create_task(client_left(request.receive))
    try:
        await asyncio.wait({requesting, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if requesting.done():
            requesting.result()
            if leaving.done():
                engine.places.give_back()
    finally:
        for task in (requesting, leaving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, RequestError):
                await task
    return Response(status_code=204)


async def give_place_back(request: Request) -> Response:
    """Respond to DELETE /place: release a reserved place."""
    app_state(request).engine.places.give_back()
    return Response(status_code=204)


async def get_usage(request: Request) -> Response:
    """Respond to GET /usage with what a request has used, by the key that its gateway chose.

    Waits up to two seconds until the request has ended. Raises HTTPException (404) if the key is unknown.
    """
    report = app_state(request).usage.find(request.query_params.get("key", ""))
    if report is None:
        raise HTTPException(404)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(report.wait(), _END_SECONDS)
    return _json(report.read())


async def get_metrics(request: Request) -> Response:
    """Respond to GET /metrics in Prometheus' text format."""
    return Response(app_state(request).metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")
