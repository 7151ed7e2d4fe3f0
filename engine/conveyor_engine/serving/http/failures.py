"""Errors as answers: status, OpenAI's JSON body, headers. Used by the app's handlers and in streams by `generated`."""

import msgspec
from starlette.responses import Response

from conveyor_engine.errors import (
    BodyTooLarge,
    BodyTooSlow,
    ConveyorEngineError,
    DeadlineExceeded,
    EncodedBody,
    EngineDead,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
)

RETRY_AFTER_SECONDS = 1
MESSAGE_CHARACTERS_MAX = 1000  # messages quote what a client or a model's template wrote, whatever its length
PARAM_CHARACTERS_MAX = 100

# error -> (status, type, code); the first class that fits
_ANSWERS: tuple[tuple[type[ConveyorEngineError], int, str, str], ...] = (
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (BodyTooSlow, 408, "invalid_request_error", "body_too_slow"),
    (BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (EncodedBody, 415, "invalid_request_error", "encoded_body"),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value"),
    (Overloaded, 429, "rate_limit_error", "queue_full"),
    (Unavailable, 503, "server_error", "unavailable"),
    (DeadlineExceeded, 504, "server_error", "deadline_exceeded"),
    (GenerationFailed, 500, "server_error", "generation_failed"),
    (EngineDead, 502, "server_error", "engine_dead"),
)


class _Error(msgspec.Struct):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


def error_body(message: str, kind: str, code: str, param: str | None = None) -> bytes:
    """{"error": {...}} in OpenAI's form."""
    param = None if param is None else _shorten(param, PARAM_CHARACTERS_MAX)
    return msgspec.json.encode({"error": _Error(_shorten(message, MESSAGE_CHARACTERS_MAX), kind, param, code)})


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def failure_body(error: ConveyorEngineError) -> bytes:
    """The JSON body for this error."""
    _, kind, code = _find(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    own_code = error.code if isinstance(error, InvalidRequest) else None
    return error_body(str(error), kind, own_code or code, param)


def failure_response(error: ConveyorEngineError) -> Response:
    """The whole answer for this error."""
    status, _, _ = _find(error)
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    return Response(failure_body(error), status, headers, media_type="application/json")


def _find(error: ConveyorEngineError) -> tuple[int, str, str]:
    for kind, status, type_name, code in _ANSWERS:
        if isinstance(error, kind):
            return status, type_name, code
    raise AssertionError(f"no answer for {error!r}")
