"""Builds the ASGI application: routes, error responses and request ids. Called by `server` with an AppState."""

import logging
from collections.abc import Awaitable, Callable
from contextlib import nullcontext

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor_engine.errors import ErrorCode, Overloaded, RequestError, Unavailable
from conveyor_engine.serving.http import info, open_inference, status, tokens
from conveyor_engine.serving.http.app_state import AppState, app_state
from conveyor_engine.serving.http.failures import error_body, failure_response
from conveyor_engine.serving.http.openapi import build_document
from conveyor_engine.serving.http.request_spans import find_trace_parent
from conveyor_engine.serving.http.task_paths import build_task_routes
from conveyor_process.tracing import enter_trace
from conveyor_protocol.engine_pages import ADAPTERS_PATH, LOAD_PATH, PLACE_PATH, STEPS_PATH, USAGE_PATH
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH, SERVER_PATH
from conveyor_protocol.request_headers import REQUEST_ID_HEADER, USAGE_HEADER, choose_request_id

_log = logging.getLogger(__name__)
# Starlette takes the first route that matches a path, so the path with a version comes first.
MODELS_OF_V2 = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
# Handlers by method and path. Clients of vLLM and SGLang first call /health, /ping or /version, some of them under /v1.
ROUTES: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
    **build_task_routes(),
    **{("POST", f"{model}/infer"): open_inference.infer for model in MODELS_OF_V2},
    **{("GET", f"{model}/ready"): open_inference.get_model_ready for model in MODELS_OF_V2},
    **{("GET", model): open_inference.get_model for model in MODELS_OF_V2},
    ("GET", SERVER_PATH): open_inference.get_server,
    ("GET", LIVE_PATH): open_inference.get_live,
    ("GET", READY_PATH): open_inference.get_ready,
    ("GET", "/v1/models"): status.list_models,
    ("GET", "/v1/models/{model:path}"): status.get_model,
    **{("GET", f"{base}/{name}"): status.get_readyz for base in ("", "/v1") for name in ("health", "ping")},
    **{("GET", f"{base}/version"): status.get_version for base in ("", "/v1")},
    ("GET", "/livez"): status.get_livez,
    ("GET", "/readyz"): status.get_readyz,
    ("GET", LOAD_PATH): status.get_load,
    ("GET", ADAPTERS_PATH): status.get_adapters,
    ("GET", STEPS_PATH): status.get_steps,
    ("GET", "/tokenizer_info"): tokens.get_tokenizer_info,
    ("GET", "/info"): info.get_info,
    ("GET", PLACE_PATH): status.request_place,
    ("DELETE", PLACE_PATH): status.give_place_back,
    ("GET", USAGE_PATH): status.get_usage,
    ("GET", "/metrics"): status.get_metrics,
}
_REQUEST_ID, _USAGE = REQUEST_ID_HEADER.lower().encode(), USAGE_HEADER.lower().encode()
_LOAD, _LOAD_FORMAT = b"endpoint-load-metrics", b"endpoint-load-metrics-format"
_V2_MODELS = "/v2/models/"
_LABELS = {"/openapi.json", *(path for _, path in ROUTES)}


def build_app(state: AppState) -> ASGIApp:
    """Return the application with all routes for this engine."""
    app = FastAPI(docs_url=None, redoc_url=None)  # their pages load scripts from other hosts
    document = build_document()  # built once, because it takes 17 ms and would block all streams
    app.openapi = lambda: document  # type: ignore[method-assign]  # FastAPI's documented way; /openapi.json
    app.state.conveyor = state
    for path in dict.fromkeys(path for _, path in ROUTES):
        handlers = {method: handler for (method, at), handler in ROUTES.items() if at == path}
        app.add_route(path, _by_method(handlers), methods=list(handlers))
    app.add_exception_handler(RequestError, _handle_failure)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_bug)
    return _Envelope(app, state)


def _by_method(
    handlers: dict[str, Callable[[Request], Awaitable[Response]]],
) -> Callable[[Request], Awaitable[Response]]:
    """Return one handler for all methods of a path, so that a 405 response lists all of them."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


async def _handle_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    if isinstance(error, Overloaded | Unavailable):
        app_state(request).metrics.count_rejection("queue_full" if isinstance(error, Overloaded) else "unavailable")
    return failure_response(error, request.url.path)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Handle Starlette's own errors: an unknown path (404) or method (405)."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"no such path: {request.url.path}", ErrorCode.PATH_NOT_FOUND
    elif error.status_code == 405:
        message, code = f"{request.url.path} does not support {request.method}", ErrorCode.METHOD_NOT_ALLOWED
    else:
        message, code = str(error.detail), ErrorCode.BAD_REQUEST
    body = error_body(message, code, path=request.url.path)
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _handle_bug(request: Request, error: Exception) -> Response:
    """Respond with 500 to any other exception, so that a bug fails one request only. The server logs the traceback."""
    body = error_body(f"internal error: {type(error).__name__}", ErrorCode.INTERNAL_ERROR, path=request.url.path)
    return Response(body, 500, media_type="application/json")


class _Envelope:
    """Adds headers to every response and counts responses by route and status.

    The headers are X-Request-Id (from the request, or new), the usage report for a gateway, and the engine's load if
    the client wants it.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, load_format = _request_id(scope), _load_format(scope)
        enter_trace(find_trace_parent(scope))

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (_REQUEST_ID, request_id)]
                if report is not None:
                    headers.append((_USAGE, report.encode()))
                message["headers"] = headers
                if load_format:
                    headers.append((_LOAD, self._describe_load(load_format)))
                self._state.metrics.count_response(_route(scope["path"]), scope["method"], message["status"])
            await send(message)

        callers, usage = self._state.callers, self._state.usage
        refusal = None if callers is None else callers.refuse(scope)
        with usage.reporting(scope) if refusal is None else nullcontext() as report:
            await (self._app if refusal is None else refusal)(scope, receive, send_with_headers)

    def _describe_load(self, load_format: str) -> bytes:
        """Return the load as an ORCA report in vLLM's format."""
        engine = self._state.engine
        waiting, usage = float(engine.num_waiting), round(engine.stats.kv_cache_usage, 4)
        named = {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
        if load_format == "JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()


def _request_id(scope: Scope) -> bytes:
    requested = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
    return choose_request_id(requested.decode("latin-1")).encode()


def _load_format(scope: Scope) -> str:
    """Return the format in which the client wants the engine's load: `TEXT`, `JSON`, or "" for no report."""
    requested: bytes = next((value for name, value in scope["headers"] if name == _LOAD_FORMAT), b"")
    wanted = requested.decode("latin-1").upper()
    return wanted if wanted in ("TEXT", "JSON") else ""


def _route(path: str) -> str:
    """Return the metrics label for a path. Unknown paths share one label, so the number of labels is bounded."""
    if path in _LABELS:
        return path
    if path.startswith(_V2_MODELS):
        return f"{_V2_MODELS}infer" if path.endswith("/infer") else _V2_MODELS[:-1]
    return "/v1/models" if path.startswith("/v1/models/") else "other"
