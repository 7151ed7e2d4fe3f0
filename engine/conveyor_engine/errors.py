"""The engine's error tree. Every error the engine raises on purpose is one of these.

    ConveyorEngineError
    ├── StartError            the process cannot start; `reason` goes into the termination message
    │   ├── ConfigError           InvalidConfig, NoDevice, KVBudgetTooLarge, KVBudgetTooSmall
    │   └── ModelError            ModelNotFound, ModelDownloadFailed, ChecksumMismatch, UnsupportedModel, OutOfMemory
    ├── RequestError          one request is refused; the engine goes on
    │   ├── InvalidRequest        the client's fault: 400, or 404 for an unknown model (`param` names the field)
    │   ├── Overloaded            the waiting queue is full: 429 + Retry-After
    │   ├── Unavailable           draining or not ready: 503 + Retry-After
    │   └── DeadlineExceeded      504
    └── EngineDead            the engine loop has ended; every open request fails

Raised by core, models and the HTTP edge; `__main__` turns StartErrors into exit messages and
`api/` turns RequestErrors into answers. Imports nothing.
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


class Overloaded(RequestError):
    """The waiting queue is full."""


class Unavailable(RequestError):
    """The engine takes no requests now: it is starting or draining."""


class DeadlineExceeded(RequestError):
    """The request's deadline passed before its answer was complete."""


class EngineDead(ConveyorEngineError):
    """The engine loop has ended; nothing will be answered any more."""
