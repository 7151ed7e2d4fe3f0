"""The engine's error tree. Every error the engine raises on purpose is one of these.

    ConveyorEngineError
    ├── StartError            the process cannot start; `reason` goes into the termination message
    │   ├── ConfigError           the configuration is not possible
    │   └── ModelError            the model cannot be downloaded, read or run
    └── RequestError          a request ends with an error; `code` determines the response
        ├── InvalidRequest        the client's fault (`param` names the field)
        │   └── UnknownModel
        ├── Overloaded            the engine has no room for the request now: a queue or a memory limit is full
        ├── NoPlace               no place (`serving.places`) is free; the gateway keeps its request in its queue
        ├── GenerationFailed      the engine could not continue this request
        ├── Unavailable           starting, draining, stopping or dead
        ├── DeadlineExceeded
        └── EngineDead            the engine loop ended while it worked on this request

An error has a class of its own if the engine treats it in its own way. An error that ends the engine has a
`FailureReason`.

A StartError's message has the names of settings in backticks, such as `device` or `device: auto`, and uses backticks
for nothing else. So a program that shows the message, such as the operator, can replace these names with its own.

Raised in all parts of the engine. `__main__` turns StartErrors into exit messages, and `serving.http` turns
RequestErrors into responses. Imports no other module of the engine.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from conveyor_protocol.answer_codes import AnswerCode
from conveyor_protocol.failure_reasons import FailureReason

# Limit on the text in a termination message, in bytes. Kubernetes keeps 4,096, and JSON escapes may double the length.
MESSAGE_BYTES_MAX = 2000

_NO_MEMORY_ERRORS = frozenset({"MemoryError", "OutOfMemoryError"})  # the second is torch's, on a device
# Texts in the messages of out-of-memory errors that have a general class, such as RuntimeError. The texts come from
# torch's allocators, its CUDA libraries, oneDNN, C++ and the C library.
_NO_MEMORY = (
    "out of memory", "out_of_memory", "not enough memory", "cannot allocate memory", "can't allocate memory",
    "alloc_failed", "bad_alloc", "could not create a memory object",
)  # fmt: skip


class ErrorCode(AnswerCode):
    """The code of an error response. Each case has its own code."""

    MALFORMED_HTTP = "malformed_http", 400, "the request is not valid HTTP"
    BAD_REQUEST = "bad_request", 400, "the request cannot be read"
    TOO_MANY_PIPELINED = (
        "too_many_pipelined",
        400,
        "too many pipelined requests on the connection wait for their answers",
    )
    INVALID_JSON = "invalid_json", 400, "the body is not JSON"
    INVALID_FORM = "invalid_form", 400, "the body is not the form (multipart/form-data) that its Content-Type announces"
    INVALID_VALUE = "invalid_value", 400, "a field has an invalid value; `param` names the field"
    UNSUPPORTED_VALUE = (
        "unsupported_value",
        400,
        "a field that this engine does not support has a value that would change the answer",
    )
    CONTEXT_LENGTH_EXCEEDED = (
        "context_length_exceeded",
        400,
        "prompt and answer together exceed the model's context",
    )
    PROMPT_TOO_COSTLY = (
        "prompt_too_costly",
        400,
        "the prompt, the images or the audio take too much CPU time or memory to read",
    )
    FORM_TOO_COSTLY = (
        "form_too_costly",
        400,
        "the answer's schema or grammar takes too much CPU time or memory to compile or to follow; simplify it",
    )
    CALLER_REFUSED = (
        "caller_refused",
        401,
        "the engine answers only its gateways, and the request has no valid token of them; the message says why",
    )
    PATH_NOT_FOUND = "path_not_found", 404, "no such path"
    MODEL_NOT_FOUND = (
        "model_not_found",
        404,
        "this engine serves another model; the message has its name. If a rollout brings engines with the requested "
        "model, the gateway waits for one of them",
    )
    WRONG_TASK = "wrong_task", 400, "the path is for models of another task; the message says what this model does"
    METHOD_NOT_ALLOWED = "method_not_allowed", 405, "the path does not support the method"
    BODY_TOO_SLOW = "body_too_slow", 408, "the body did not arrive within 60 s"
    REQUEST_TOO_LARGE = (
        "request_too_large",
        413,
        "the body is longer than the limit: the largest of 1 MiB, 32 bytes for each token of the context, and the "
        "task's limit (4 MiB to embed, rank or classify texts, 8 MiB for tensors and pictures to classify, 26 MiB for "
        "audio)",
    )
    ENCODED_BODY = "encoded_body", 415, "the body has another `Content-Encoding` than gzip"
    QUEUE_FULL = "queue_full", 429, "the engine has no room for the request; the gateway tries another engine"
    HEADERS_TOO_LARGE = "headers_too_large", 431, "request line and headers are too long"
    INTERNAL_ERROR = "internal_error", 500, "a bug in the engine's server; its log has the traceback"
    GENERATION_FAILED = "generation_failed", 500, "the engine could not continue this request"
    ENGINE_DEAD = "engine_dead", 502, "the engine died during the request; the gateway tries one more engine"
    UNAVAILABLE = "unavailable", 503, "the engine is starting, draining or stopping; the gateway tries another engine"
    TOO_MANY_CONNECTIONS = "too_many_connections", 503, "the engine is at its limit of connections"
    DEADLINE_EXCEEDED = "deadline_exceeded", 504, "the request's deadline, set by the service or the client, has passed"


class ConveyorEngineError(Exception):
    """The root of the tree."""


class StartError(ConveyorEngineError):
    """The engine cannot start. `reason` and message are its termination message."""

    reason: FailureReason

    def __init__(self, message: str, *, reason: FailureReason) -> None:
        super().__init__(one_line(message))
        self.reason = reason


class ConfigError(StartError):
    """The configuration is not possible."""

    def __init__(self, message: str, *, reason: FailureReason = FailureReason.INVALID_CONFIG) -> None:
        super().__init__(message, reason=reason)


class ModelError(StartError):
    """The model cannot be downloaded or read, or this engine cannot run it."""

    def __init__(self, message: str, *, reason: FailureReason = FailureReason.UNSUPPORTED_MODEL) -> None:
        super().__init__(message, reason=reason)


@contextmanager
def named(setting: str) -> Iterator[None]:
    """Put the setting before the message of a StartError, which otherwise seems to be about the model."""
    try:
        yield
    except StartError as error:
        kind = ConfigError if isinstance(error, ConfigError) else ModelError
        raise kind(f"`{setting}`: {error}", reason=error.reason) from error


def one_line(message: str) -> str:
    """Return a message that can be logged or be a termination message: on one line, printable, and not too long.

    This is necessary because the message may quote a model's files.
    """
    printable = (each if each.isprintable() else " " for each in message[:MESSAGE_BYTES_MAX])
    line = " ".join("".join(printable).split())
    return line.encode()[:MESSAGE_BYTES_MAX].decode(errors="ignore")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether the error reports that the GPU or the host has no memory left.

    Finds torch's class by its name, because this module does not import torch.
    """
    if any(kind.__name__ in _NO_MEMORY_ERRORS for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError | OSError) and any(words in str(error).lower() for words in _NO_MEMORY)


def explain_crash(error: Exception) -> tuple[FailureReason, str]:
    """Return the termination reason and the message for an unexpected exception, which ends the process."""
    reason = FailureReason.OUT_OF_MEMORY if is_out_of_memory(error) else FailureReason.ENGINE_ERROR
    return reason, one_line(f"{type(error).__name__}: {error}")


class RequestError(ConveyorEngineError):
    """A request ends with an error. `param` is the name of the wrong field, if there is one."""

    code: ErrorCode
    param: str | None = None


class InvalidRequest(RequestError):
    """The request is wrong. `code` identifies the case."""

    def __init__(self, message: str, *, param: str | None = None, code: ErrorCode = ErrorCode.INVALID_VALUE) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def context_exceeded(max_model_len: int, problem: str, *, param: str) -> InvalidRequest:
    """Return the error for a request that is too long. problem: says what is too long, and what to do.

    litellm and other clients recognise this case by the message's first words, so these equal OpenAI's and vLLM's.
    """
    message = f"This model's maximum context length is {max_model_len} tokens. However, {problem}"
    return InvalidRequest(message, param=param, code=ErrorCode.CONTEXT_LENGTH_EXCEEDED)


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here. `model` is that name; empty if only the version is wrong."""

    def __init__(self, message: str, *, param: str | None = None, model: str = "") -> None:
        super().__init__(message, param=param, code=ErrorCode.MODEL_NOT_FOUND)
        self.model = model


class Overloaded(RequestError):
    """The engine has no room for the request now, because a queue or a memory limit is full."""

    code = ErrorCode.QUEUE_FULL


class NoPlace(RequestError):
    """No place (`serving.places`) is free for a gateway's request. The gateway keeps the request in its queue."""

    code = ErrorCode.QUEUE_FULL


class GenerationFailed(RequestError):
    """The engine could not continue this request. Other requests continue."""

    code = ErrorCode.GENERATION_FAILED


class Unavailable(RequestError):
    """The engine accepts no requests now, or ends its open ones, because it is starting, draining, stopping or dead."""

    code = ErrorCode.UNAVAILABLE


class DeadlineExceeded(RequestError):
    """The request's deadline passed before its answer was complete."""

    code = ErrorCode.DEADLINE_EXCEEDED


class EngineDead(RequestError):
    """The engine loop ended while it worked on this request, which may be the cause.

    All open requests get this error.
    """

    code = ErrorCode.ENGINE_DEAD
