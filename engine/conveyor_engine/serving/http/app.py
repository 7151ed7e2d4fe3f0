"""The ASGI application: routes, errors as answers, request ids. Built by `server` around an AppState."""

import logging
from collections.abc import Awaitable, Callable

import msgspec
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conveyor_engine.errors import ConveyorEngineError, ErrorCode, Overloaded, Unavailable
from conveyor_engine.serving.http import open_inference, status, tokens
from conveyor_engine.serving.http.app_state import AppState, app_state
from conveyor_engine.serving.http.failures import error_body, failure_response
from conveyor_engine.serving.http.openapi import build_document
from conveyor_engine.serving.http.task_paths import build_task_routes
from conveyor_protocol.open_inference import LIVE_PATH, READY_PATH, SERVER_PATH
from conveyor_protocol.request_headers import REQUEST_ID_HEADER, USAGE_HEADER, USAGE_PATH, choose_request_id

_log = logging.getLogger(__name__)
# The first that fits a path counts.
MODELS_OF_V2 = ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}")
# By method and path. Clients of vLLM and SGLang begin with /health, /ping or /version, some below the OpenAI base URL.
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
    ("GET", "/load"): status.get_load,
    ("GET", "/tokenizer_info"): tokens.get_tokenizer_info,
    ("GET", "/place"): status.ask_for_place,
    ("DELETE", "/place"): status.give_place_back,
    ("GET", USAGE_PATH): status.get_usage,
    ("GET", "/metrics"): status.get_metrics,
}
_REQUEST_ID, _USAGE = REQUEST_ID_HEADER.lower().encode(), USAGE_HEADER.lower().encode()
_LOAD, _LOAD_FORMAT = b"endpoint-load-metrics", b"endpoint-load-metrics-format"
_V2_MODELS = "/v2/models/"
_LABELS = {"/openapi.json", *(path for _, path in ROUTES)}


def build_app(state: AppState) -> ASGIApp:
    """All routes over this engine."""
    app = FastAPI(docs_url=None, redoc_url=None)  # their pages load scripts from other hosts
    document = build_document()  # once: it takes 17 ms, for which it would block every stream
    app.openapi = lambda: document  # type: ignore[method-assign]  # as FastAPI has it be extended; served at /openapi.json
    app.state.conveyor = state
    for path in dict.fromkeys(path for _, path in ROUTES):
        handlers = {method: handler for (method, at), handler in ROUTES.items() if at == path}
        app.add_route(path, _by_method(handlers), methods=list(handlers))
    app.add_exception_handler(ConveyorEngineError, _handle_failure)
    app.add_exception_handler(HTTPException, _handle_http_exception)
    app.add_exception_handler(Exception, _handle_bug)
    return _Envelope(app, state)


def _by_method(
    handlers: dict[str, Callable[[Request], Awaitable[Response]]],
) -> Callable[[Request], Awaitable[Response]]:
    """One route for all methods of a path, so that 405 lists them all."""

    async def handle(request: Request) -> Response:
        return await handlers["GET" if request.method == "HEAD" else request.method](request)

    return handle


async def _handle_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, ConveyorEngineError)
    if isinstance(error, Overloaded | Unavailable):
        app_state(request).metrics.count_rejection("queue_full" if isinstance(error, Overloaded) else "unavailable")
    return failure_response(error, request.url.path)


async def _handle_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        message, code = f"no such path: {request.url.path}", ErrorCode.PATH_NOT_FOUND
    elif error.status_code == 405:
        message, code = f"{request.method} is not for {request.url.path}", ErrorCode.METHOD_NOT_ALLOWED
    else:
        message, code = str(error.detail), ErrorCode.BAD_REQUEST
    body = error_body(message, code, path=request.url.path)
    return Response(body, error.status_code, error.headers, media_type="application/json")


async def _handle_bug(request: Request, error: Exception) -> Response:
    """The one broad handler of this process: a bug fails its own request only. The server logs the traceback."""
    body = error_body(f"internal error: {type(error).__name__}", ErrorCode.INTERNAL_ERROR, path=request.url.path)
    return Response(body, 500, media_type="application/json")


class _Envelope:
    """Around every answer: X-Request-Id as it came, or a new one; what it has used; the engine's load, if the client
    wants it; and a count by route and status."""

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id, load_format = _request_id(scope), _load_format(scope)

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

        with self._state.usage.reporting(scope) as report:
            await self._app(scope, receive, send_with_headers)

    def _describe_load(self, load_format: str) -> bytes:
        """An ORCA report, as vLLM writes it."""
        engine = self._state.engine
        waiting, usage = float(engine.num_waiting), round(engine.stats.kv_cache_usage, 4)
        named = {"num_requests_waiting": waiting, "kv_cache_usage_perc": usage}
        if load_format == "JSON":
            return b"JSON " + msgspec.json.encode({"named_metrics": named})
        return b"TEXT " + ", ".join(f"named_metrics.{name}={value}" for name, value in named.items()).encode()


def _request_id(scope: Scope) -> bytes:
    wish = next((value for name, value in scope["headers"] if name == _REQUEST_ID), b"")
    return choose_request_id(wish.decode("latin-1")).encode()


def _load_format(scope: Scope) -> str:
    """In which the client wants the engine's load: `TEXT`, `JSON`, or not at all."""
    wish: bytes = next((value for name, value in scope["headers"] if name == _LOAD_FORMAT), b"")
    wanted = wish.decode("latin-1").upper()
    return wanted if wanted in ("TEXT", "JSON") else ""


def _route(path: str) -> str:
    """A label with few values, whatever clients ask for."""
    if path in _LABELS:
        return path
    if path.startswith(_V2_MODELS):
        return f"{_V2_MODELS}infer" if path.endswith("/infer") else _V2_MODELS[:-1]
    return "/v1/models" if path.startswith("/v1/models/") else "other"
