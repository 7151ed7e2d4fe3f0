"""Errors as answers: status, OpenAI's JSON body, headers. Used by the app's handlers and in streams by `generated`."""

from collections.abc import Sequence

import msgspec
from pydantic import ValidationError
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


def invalid_request(error: ValidationError) -> InvalidRequest:
    """The first thing that pydantic found, as a sentence that begins with the field."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    message, kind = first["msg"], first["type"]
    if kind == "json_invalid":
        return InvalidRequest(f"the body is not JSON: {message}", code="invalid_json")
    if kind == "extra_forbidden":
        *around, name = first["loc"]  # the client's own word, whatever it looks like
        path = ".".join(filter(None, (_field_path(around), str(name))))
        return InvalidRequest(f"{path} is not a field that this engine knows", param=path, code="unknown_field")
    path = _field_path(first["loc"])
    if not path:
        own = kind if kind in message else None  # a check over several fields names its field as its type
        return InvalidRequest(message if own else f"the body must be a JSON object: {message}", param=own)
    code = "unsupported_value" if kind == "unsupported" else None
    return InvalidRequest(f"{path} {_as_predicate(message)}", param=path, code=code)


def _field_path(location: Sequence[int | str]) -> str:
    """('messages', 0, 'content') -> messages[0].content; the names of union members are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier():
            path += f".{part}" if path else part
    return path


def _as_predicate(message: str) -> str:
    """Pydantic's "Input should be ..." as the end of a sentence."""
    if message == "Field required":
        return "is missing"
    return message.replace("Input should", "must", 1)
