"""Turns errors into responses: a status, headers, and a JSON body in the format that the path's clients expect.

Used by the app's handlers, and by the formats for errors in streams.
"""

from urllib.parse import quote

import msgspec
from starlette.responses import Response

from conveyor_engine.errors import (
    DeadlineExceeded,
    ErrorCode,
    GenerationFailed,
    InvalidRequest,
    NoPlace,
    RequestError,
    UnknownModel,
)
from conveyor_engine.wire.request import FinishReason, RequestOutput
from conveyor_protocol.answer_codes import find_error_form
from conveyor_protocol.request_headers import NO_PLACE, PLACE_HEADER, UNKNOWN_MODEL_HEADER

RETRY_AFTER_SECONDS = 1
MESSAGE_CHARACTERS_MAX = 1000  # messages may quote text of any length from a client or a template
PARAM_CHARACTERS_MAX = 100
MODEL_CHARACTERS_MAX = 1000  # the gateway is told of no longer name; no service has one


def error_body(message: str, code: ErrorCode, param: str | None = None, path: str = "") -> bytes:
    """Return the JSON of an error in the format of the path's clients. The default format is {"error": {...}}."""
    param = None if param is None else _shorten(param, PARAM_CHARACTERS_MAX)
    message = _shorten(message, MESSAGE_CHARACTERS_MAX)
    return msgspec.json.encode(find_error_form(path).build(message, code, param))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def failure_body(error: RequestError, path: str = "") -> bytes:
    """Return the JSON body for this error."""
    return error_body(str(error), error.code, error.param, path)


def failure_response(error: RequestError, path: str = "") -> Response:
    """Return the response for this error."""
    status = error.code.status
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    if isinstance(error, NoPlace):
        headers[PLACE_HEADER] = NO_PLACE
    if isinstance(error, UnknownModel) and 0 < len(error.model) <= MODEL_CHARACTERS_MAX:
        headers[UNKNOWN_MODEL_HEADER] = quote(error.model, errors="replace")
    return Response(failure_body(error, path), status, headers, media_type="application/json")


def find_failure(output: RequestOutput) -> DeadlineExceeded | InvalidRequest | GenerationFailed | None:
    """Return the error that an output reports; None if the output reports none."""
    if not output.has_failed:
        return None
    if output.finish_reason is FinishReason.DEADLINE:
        return DeadlineExceeded(output.message or "the request's time ran out before its answer was complete")
    if output.finish_reason is FinishReason.FORBIDDEN:
        return InvalidRequest(output.message or "the request's parameters allow no next token")
    if output.finish_reason is FinishReason.COSTLY:
        return InvalidRequest(output.message or "the answer's form costs too much", code=ErrorCode.FORM_TOO_COSTLY)
    return GenerationFailed(output.message or "the engine could not continue this request")
