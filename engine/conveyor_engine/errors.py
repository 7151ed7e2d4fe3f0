"""The engine's error tree. Every error the engine raises on purpose is one of these.

    ConveyorEngineError
    ├── StartError            the process cannot start; `reason` goes into the termination message
    │   ├── ConfigError           InvalidConfig, NoDevice, KVBudgetTooLarge, KVBudgetTooSmall
    │   └── ModelError            ModelNotFound, ModelDownloadFailed, ChecksumMismatch, UnsupportedModel, OutOfMemory
    ├── RequestError          one request is refused; the engine goes on
    │   ├── InvalidRequest        the client's fault (`param` names the field)
    │   │   ├── UnknownModel
    │   │   ├── BodyTooSlow
    │   │   ├── BodyTooLarge
    │   │   └── EncodedBody
    │   ├── Overloaded            the waiting queue is full
    │   ├── GenerationFailed      the engine could not go on with this request
    │   ├── Unavailable           starting, draining, going away or dead
    │   └── DeadlineExceeded
    └── EngineDead            the engine loop ended while it worked on this request

What of it a client reads has an `ErrorCode`; `serving.http.failures` has the HTTP status of each.

A StartError's sentence has the names of settings in backticks, `device` or `device: auto`, and nothing else: whoever
shows it to people who know other names for them, as Conveyor's operator does, can put those in their place.

Raised by core, models and the HTTP edge; `__main__` turns StartErrors into exit messages and
`serving.http` turns RequestErrors into answers. Imports nothing of ours.
"""

from enum import StrEnum


class ErrorCode(StrEnum):
    """The `code` of every answer that is an error."""

    MALFORMED_HTTP = "malformed_http"
    BAD_REQUEST = "bad_request"
    TOO_MANY_PIPELINED = "too_many_pipelined"
    INVALID_JSON = "invalid_json"
    INVALID_VALUE = "invalid_value"
    UNKNOWN_FIELD = "unknown_field"
    UNSUPPORTED_VALUE = "unsupported_value"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    PROMPT_TOO_COSTLY = "prompt_too_costly"
    PATH_NOT_FOUND = "path_not_found"
    MODEL_NOT_FOUND = "model_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_SLOW = "body_too_slow"
    REQUEST_TOO_LARGE = "request_too_large"
    ENCODED_BODY = "encoded_body"
    QUEUE_FULL = "queue_full"
    HEADERS_TOO_LARGE = "headers_too_large"
    INTERNAL_ERROR = "internal_error"
    GENERATION_FAILED = "generation_failed"
    ENGINE_DEAD = "engine_dead"
    UNAVAILABLE = "unavailable"
    TOO_MANY_CONNECTIONS = "too_many_connections"
    DEADLINE_EXCEEDED = "deadline_exceeded"


class ConveyorEngineError(Exception):
    """Root of the tree."""


class StartError(ConveyorEngineError):
    """The engine cannot start. `reason` is one CamelCase word of the termination contract."""

    reason: str

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class ConfigError(StartError):
    """The configuration asks for what cannot be."""

    def __init__(self, message: str, *, reason: str = "InvalidConfig") -> None:
        super().__init__(message, reason=reason)


class ModelError(StartError):
    """The model cannot be had, or cannot be run by this engine."""

    def __init__(self, message: str, *, reason: str = "UnsupportedModel") -> None:
        super().__init__(message, reason=reason)


class RequestError(ConveyorEngineError):
    """One request is refused; nothing else is affected."""


class InvalidRequest(RequestError):
    """The client's fault. `param` names the offending field of the request, when there is one; `code` the case."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = None if code is None else ErrorCode(code)


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""


class BodyTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than is read."""


class EncodedBody(InvalidRequest):
    """The request's body is compressed."""


class Overloaded(RequestError):
    """The waiting queue is full."""


class GenerationFailed(RequestError):
    """The engine could not go on with this one request."""


class Unavailable(RequestError):
    """The engine takes no requests now, or ends those it has: it is starting, draining, going away or dead."""


class DeadlineExceeded(RequestError):
    """The request's deadline passed before its answer was complete."""


class EngineDead(ConveyorEngineError):
    """The engine loop ended while it worked on this request, which may be why. Every open request fails with it."""
