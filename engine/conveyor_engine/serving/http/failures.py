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
    ErrorCode,
    GenerationFailed,
    InvalidRequest,
    Overloaded,
    Unavailable,
    UnknownModel,
)
from conveyor_engine.serving.http.answers import ErrorAnswer, ErrorDetails, ErrorType

RETRY_AFTER_SECONDS = 1
MESSAGE_CHARACTERS_MAX = 1000  # messages quote what a client or a model's template wrote, whatever its length
PARAM_CHARACTERS_MAX = 100

# Each code's HTTP status, and what it means to whoever gets it. docs/errors.md is written from it.
ANSWERS: dict[ErrorCode, tuple[int, str]] = {
    ErrorCode.MALFORMED_HTTP: (400, "it is no HTTP request"),
    ErrorCode.BAD_REQUEST: (400, "the request cannot be read"),
    ErrorCode.TOO_MANY_PIPELINED: (400, "more requests wait on the connection for an answer before theirs than may"),
    ErrorCode.INVALID_JSON: (400, "the body is not JSON"),
    ErrorCode.INVALID_VALUE: (400, "a field, which `param` names, has a value that it must not have"),
    ErrorCode.UNKNOWN_FIELD: (400, "a field that is not in [the tables](openai-fields.md)"),
    ErrorCode.UNSUPPORTED_VALUE: (400, "a field that this engine does not act on, with a value that would act"),
    ErrorCode.CONTEXT_LENGTH_EXCEEDED: (400, "prompt and answer together are longer than the model's context"),
    ErrorCode.PROMPT_TOO_COSTLY: (400, "the prompt takes more CPU time or memory to render and tokenize than it may"),
    ErrorCode.PATH_NOT_FOUND: (404, "no such path"),
    ErrorCode.MODEL_NOT_FOUND: (404, "this engine serves another model; the message has its name"),
    ErrorCode.METHOD_NOT_ALLOWED: (405, "the path takes another method"),
    ErrorCode.BODY_TOO_SLOW: (408, "the body did not arrive within 60 s"),
    ErrorCode.REQUEST_TOO_LARGE: (413, "the body is longer than 32 bytes per token of the context, and than 1 MiB"),
    ErrorCode.ENCODED_BODY: (415, "the body is compressed"),
    ErrorCode.QUEUE_FULL: (429, "the engine has no room for the request; the gateway asks another"),
    ErrorCode.HEADERS_TOO_LARGE: (431, "request line and headers are too long"),
    ErrorCode.INTERNAL_ERROR: (500, "a bug of the engine's server; its log has the traceback"),
    ErrorCode.GENERATION_FAILED: (500, "the engine could not go on with this request"),
    ErrorCode.ENGINE_DEAD: (502, "the engine died while it worked on the request; the gateway asks one more"),
    ErrorCode.UNAVAILABLE: (503, "the engine starts, drains or goes away; the gateway asks another"),
    ErrorCode.TOO_MANY_CONNECTIONS: (503, "the engine has as many connections as it may"),
    ErrorCode.DEADLINE_EXCEEDED: (504, "the request's time, the service's or the client's, is over"),
}
# The code of each error that names none itself; the first class that fits.
_CODES: tuple[tuple[type[ConveyorEngineError], ErrorCode], ...] = (
    (UnknownModel, ErrorCode.MODEL_NOT_FOUND),
    (BodyTooSlow, ErrorCode.BODY_TOO_SLOW),
    (BodyTooLarge, ErrorCode.REQUEST_TOO_LARGE),
    (EncodedBody, ErrorCode.ENCODED_BODY),
    (InvalidRequest, ErrorCode.INVALID_VALUE),
    (Overloaded, ErrorCode.QUEUE_FULL),
    (Unavailable, ErrorCode.UNAVAILABLE),
    (DeadlineExceeded, ErrorCode.DEADLINE_EXCEEDED),
    (GenerationFailed, ErrorCode.GENERATION_FAILED),
    (EngineDead, ErrorCode.ENGINE_DEAD),
)


def find_type(status: int) -> ErrorType:
    """OpenAI's word for the kind of error."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


def error_body(message: str, code: ErrorCode, param: str | None = None) -> bytes:
    """{"error": {...}} in OpenAI's form."""
    param = None if param is None else _shorten(param, PARAM_CHARACTERS_MAX)
    kind = find_type(ANSWERS[code][0])
    details = ErrorDetails(_shorten(message, MESSAGE_CHARACTERS_MAX), kind, param, code)
    return msgspec.json.encode(ErrorAnswer(details))


def _shorten(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 4]} ..."


def failure_body(error: ConveyorEngineError) -> bytes:
    """The JSON body for this error."""
    return error_body(str(error), _find_code(error), error.param if isinstance(error, InvalidRequest) else None)


def failure_response(error: ConveyorEngineError) -> Response:
    """The whole answer for this error."""
    status, _ = ANSWERS[_find_code(error)]
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status in (429, 503) else {}
    return Response(failure_body(error), status, headers, media_type="application/json")


def _find_code(error: ConveyorEngineError) -> ErrorCode:
    if isinstance(error, InvalidRequest) and error.code is not None:
        return error.code
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    raise AssertionError(f"no answer for {error!r}")
