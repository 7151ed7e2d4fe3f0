"""Everything that the gateway itself answers instead of an engine, each with its HTTP status.

GatewayError
├── InvalidRequest        400  the request cannot be read, or says something that makes no sense
│   ├── RequestTooSlow    408  the body did not arrive in time
│   ├── RequestTooLarge   413  the body is longer than the gateway keeps
│   ├── EncodedBody       415  a compressed body cannot be routed by the model it names
│   ├── Misdirected       421  the Host names a service, but no namespace
│   └── HeadersTooLarge   431  request line or headers are longer than the limits
├── NotFound              404  no such path, service or model
├── MethodNotAllowed      405  the path exists, for another method
├── QueueFull             429  the service's queue is full
├── EngineFailed          502  an engine died before its answer was complete
├── Unavailable           503  the gateway cannot take the request now: starting, stopping, no memory left for bodies
└── TimedOut              504  no engine took, or answered, the request in time

A client that goes away gets no answer: its request is cancelled (asyncio.CancelledError) wherever it is.
`conveyor_process.settings.SettingsError` (a wrong flag or variable) reaches no client.
"""

from typing import ClassVar


class GatewayError(Exception):
    """An answer in OpenAI's form. `code` names the case, `param` the field of the request at fault."""

    status: ClassVar[int]
    type: ClassVar[str] = "invalid_request_error"
    headers: ClassVar[dict[str, str]] = {}

    def __init__(self, message: str, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def to_json(self) -> dict[str, dict[str, str | None]]:
        """The answer's body, as an object."""
        return {"error": {"message": str(self), "type": self.type, "param": self.param, "code": self.code}}


class InvalidRequest(GatewayError):
    status = 400


class RequestTooSlow(InvalidRequest):
    status = 408


class RequestTooLarge(InvalidRequest):
    status = 413


class EncodedBody(InvalidRequest):
    status = 415


class Misdirected(InvalidRequest):
    status = 421


class HeadersTooLarge(InvalidRequest):
    status = 431


class NotFound(GatewayError):
    status = 404


class MethodNotAllowed(GatewayError):
    status = 405

    def __init__(self, message: str, allowed: str) -> None:
        super().__init__(message, "method_not_allowed")
        self.allowed = allowed


class QueueFull(GatewayError):
    status = 429
    type = "rate_limit_error"
    headers: ClassVar = {"Retry-After": "1"}


class EngineFailed(GatewayError):
    status = 502
    type = "server_error"


class Unavailable(GatewayError):
    status = 503
    type = "server_error"
    headers: ClassVar = {"Retry-After": "1"}


class TimedOut(GatewayError):
    status = 504
    type = "server_error"

    def with_hint(self, service: str) -> "TimedOut":
        """The same, with where to look; `service` is `namespace/name`."""
        namespace, _, name = service.partition("/")
        return TimedOut(f"{self}; kubectl describe infsvc {name} -n {namespace} says how it is", self.code, self.param)
