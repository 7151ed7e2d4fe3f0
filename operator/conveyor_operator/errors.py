"""Every error the operator raises on purpose, in one tree.

    OperatorError
    └── ApiError            a call to the API server failed
        ├── Refused         it will be refused again until somebody changes something: 400, 403, 422, ...
        ├── Conflict        somebody was faster; look again and retry: 409
        └── Unavailable     nobody's fault: 401, 429, 5xx, no connection, no answer in time

`cluster` raises the ApiErrors, `reconcile` turns Refused into a condition, `workers` retries the rest. A resource
that cannot be parsed is `conveyor_api.errors.InvalidResource`. Must not know Kopf or the client library.
"""


class OperatorError(Exception):
    """Base of the tree."""


class ApiError(OperatorError):
    """`reason` is the API's CamelCase reason ("Invalid", "Forbidden"), `message` its own sentence."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message


class Refused(ApiError):
    """The same call will be refused again."""


class Conflict(ApiError):
    """The object changed, or a field belongs to somebody else."""


class Unavailable(ApiError):
    """The call may succeed later; `retry_after_seconds` if the server named a time."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.retry_after_seconds = retry_after_seconds
