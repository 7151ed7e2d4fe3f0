"""The gateway's own error responses: the table `Code`, and the exception.

Callers catch `GatewayError`. Its `Code` determines the status and the type; the two subclasses only add a header.

A client that leaves gets no response. Its request is cancelled (asyncio.CancelledError) at whatever point it is.
`conveyor_process.settings.SettingsError` (an invalid flag or variable) is not sent to clients.
"""

import math
from typing import Any

from conveyor_protocol.answer_codes import AnswerCode, find_error_form

DEFAULT_RETRY_AFTER_SECONDS = 1


class Code(AnswerCode):
    """The code, HTTP status and meaning of each error that the gateway itself returns."""

    MALFORMED_HTTP = "malformed_http", 400, "the request is not valid HTTP"
    MALFORMED_BODY = (
        "malformed_body",
        400,
        "the body does not match its Content-Length, chunked encoding or gzip, or its chunks are too small; the "
        "message says which",
    )
    INVALID_JSON = (
        "invalid_json",
        400,
        "the body is not a JSON object: at the gateway's root, or while the service is scaled to zero",
    )
    INVALID_FORM = (
        "invalid_form",
        400,
        "at the gateway's root: the body is not the form that its Content-Type announces",
    )
    INVALID_VALUE = (
        "invalid_value",
        400,
        "while the service is scaled to zero: the body lacks a field that the path requires; `param` names it",
    )
    WRONG_TASK = (
        "wrong_task",
        400,
        "while the service is scaled to zero: the path is for models of another task; the message has the service's",
    )
    NO_MODEL = (
        "no_model",
        400,
        "at the gateway's root: no `model` in the body, in a form before its files, or in the first or last MiB of a "
        "longer body",
    )
    INVALID_TIMEOUT = "invalid_timeout", 400, "`X-Request-Timeout-Seconds` is not a number of at least 0.001"
    UNKNOWN_CLASS = "unknown_class", 400, "the service has no class of that name; the message lists its classes"
    NO_CLASSES = "no_classes", 400, "the body has a `priority` other than 0, and the service has no `queue.classes`"
    PRIORITY_NOT_READ = (
        "priority_not_read",
        400,
        "the gateway does not read `priority` in a body above 1 MiB; use `X-Request-Class`",
    )
    NO_API_KEY = (
        "missing_api_key",
        401,
        "the request has no key, and there is no such service that can be used without one",
    )
    INVALID_API_KEY = (
        "invalid_api_key",
        401,
        "the key or token is unknown, revoked or expired, and there is no such service that can be used without one",
    )
    PATH_NOT_FOUND = "path_not_found", 404, "no such path; the message lists the paths"
    SERVICE_NOT_FOUND = "service_not_found", 404, "no such service, or none that the key may use"
    SERVICE_DELETED = "service_deleted", 404, "the service was deleted while the request waited"
    MODEL_NOT_FOUND = (
        "model_not_found",
        404,
        "no service that the key may use serves the model, or the requested service serves another model; also for "
        "`GET /v1/models/MODEL` at the root, if the root does not list the model",
    )
    RECEIPT_NOT_FOUND = "receipt_not_found", 404, "`/receipt`: this gateway keeps no receipt of the request"
    METHOD_NOT_ALLOWED = (
        "method_not_allowed",
        405,
        "the path does not support the method; the header `Allow` names the supported method",
    )
    BODY_TOO_SLOW = "body_too_slow", 408, "the body did not arrive in time"
    REQUEST_TOO_LARGE = (
        "request_too_large",
        413,
        "the body is longer than `--max-request-bytes` (26 MiB for audio), decompressed",
    )
    ENCODED_BODY = "encoded_body", 415, "the body has another `Content-Encoding` than gzip"
    HOST_WITHOUT_NAMESPACE = "host_without_namespace", 421, "the host names a service but no namespace"
    QUEUE_FULL = (
        "queue_full",
        429,
        "the queue is full: this gateway's share of `queue.maxRequests`, or of the class's `maxRequests`, is used up",
    )
    TOO_MANY_REQUESTS = (
        "too_many_requests",
        429,
        "the gateway has no room for so many requests of this namespace, service or client",
    )
    RATE_LIMITED = (
        "rate_limit_exceeded",
        429,
        "the key, its owner or its namespace has reached a limit of requests or tokens; the message says which",
    )
    HEADERS_TOO_LARGE = "headers_too_large", 431, "request line or headers are too long"
    INTERNAL_ERROR = "internal_error", 500, "a bug in the gateway; its log has the request's id"
    UNKNOWN_TRANSFER_CODING = (
        "unknown_transfer_coding",
        501,
        "the request has a `Transfer-Encoding` other than `chunked`",
    )
    ENGINE_LOST = (
        "engine_lost",
        502,
        "two engines died before they responded, or one on a node that is not lost, "
        "if the answer has to follow a form (schema, grammar, tools)",
    )
    ENDS_ENGINES = "ends_engines", 502, "two engines died with the same request, which has a form, within a minute"
    ENGINE_BROKE = "engine_broke", 502, "the engine died during its response; a stream ends with this error as an event"
    NOT_SYNCED = "not_synced", 503, "the gateway is starting and does not know the services yet"
    NOT_READY = "not_ready", 503, "`/health` of the gateway: it is starting or stopping"
    NO_ENGINE = "no_engine", 503, "`/health` or another page that an engine returns: no engine is ready"
    START_FAILED = (
        "start_failed",
        503,
        "no engine is ready, and none can start; the message has the reason",
    )
    ENGINES_NOT_READY = (
        "engines_not_ready",
        503,
        "`/openapi.json` or another page of a service: its pods are ready, but no engine returned the page",
    )
    STOPPING = "stopping", 503, "the gateway is stopping"
    GATEWAY_MEMORY_FULL = "gateway_memory_full", 503, "the gateway's memory for requests is full (`--max-held-bytes`)"
    TOO_MANY_CONNECTIONS = (
        "too_many_connections",
        503,
        "the gateway is at its limit of connections (`--max-connections`)",
    )
    EVICTED = (
        "evicted",
        503,
        "the gateway was full, and the namespace, service or client of a response that had begun had more than its "
        "part; a stream ends with this error as an event",
    )
    QUEUE_TIMEOUT = "queue_timeout", 504, "no engine could take the request within `queue.timeout`"
    DEADLINE_EXCEEDED = "deadline_exceeded", 504, "the request's deadline, set by the service or the client, has passed"


class GatewayError(Exception):
    """An error response in the format that the path's clients expect. `param`: the invalid field of the request."""

    def __init__(self, message: str, code: Code, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    @property
    def status(self) -> int:
        return self.code.status

    @property
    def headers(self) -> dict[str, str]:
        """The headers of the error response."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(DEFAULT_RETRY_AFTER_SECONDS)} if self.status in (429, 503) else {}

    def to_json(self, path: str = "") -> Any:
        """Return the body of the error response as an object for JSON."""
        return find_error_form(path).build(str(self), self.code, self.param)


class MethodNotAllowed(GatewayError):
    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message, Code.METHOD_NOT_ALLOWED)
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {"Allow": self.allowed}


class QueueFull(GatewayError):
    def __init__(self, message: str, code: Code, retry_after_seconds: int) -> None:
        super().__init__(message, code)
        self._retry_after_seconds = retry_after_seconds

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": str(self._retry_after_seconds)}


class RateLimited(GatewayError):
    def __init__(self, message: str, retry_after_seconds: float, headers: dict[str, str] | None = None) -> None:
        super().__init__(message, Code.RATE_LIMITED)
        self._headers = {"Retry-After": str(max(1, math.ceil(retry_after_seconds))), **(headers or {})}

    @property
    def headers(self) -> dict[str, str]:
        return self._headers
