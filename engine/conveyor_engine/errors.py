"""The engine's error tree. Every error the engine raises on purpose is one of these.

    ConveyorEngineError
    ├── StartError            the process cannot start; `reason` goes into the termination message
    │   ├── ConfigError           InvalidConfig, NoDevice, KVBudgetTooLarge, KVBudgetTooSmall
    │   └── ModelError            ModelNotFound, ModelDownloadFailed, ChecksumMismatch, UnsupportedModel, OutOfMemory
    ├── RequestError          one request is refused; the engine goes on
    │   ├── InvalidRequest        the client's fault: 400 (`param` names the field)
    │   │   ├── UnknownModel          404
    │   │   ├── BodyTooSlow           408
    │   │   ├── BodyTooLarge          413
    │   │   └── EncodedBody           415
    │   ├── Overloaded            the waiting queue is full: 429 + Retry-After
    │   ├── GenerationFailed      the engine could not go on with this request: 500
    │   ├── Unavailable           starting, draining, going away or dead: 503 + Retry-After
    │   └── DeadlineExceeded      504
    └── EngineDead            the engine loop ended while it worked on this request: 502

A StartError's sentence has the names of settings in backticks, `device` or `device: auto`, and nothing else: whoever
shows it to people who know other names for them, as Conveyor's operator does, can put those in their place.

Raised by core, models and the HTTP edge; `__main__` turns StartErrors into exit messages and
`serving.http` turns RequestErrors into answers. Imports nothing.
"""


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
    """The client's fault. `param` names the offending field of the request, when there is one."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


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
