"""The operator's exceptions, in one hierarchy.

    ApiError            a call to the API server failed
    ├── Refused         it will be refused again until somebody changes something: 400, 403, 422, ...
    ├── Conflict        the object has changed meanwhile; look again and retry: 409
    └── Unavailable     it may succeed later: 401, 429, 5xx, no connection, no answer in time

`cluster` raises them, `reconcile` tells them in a condition, `workers` retries. A resource
that cannot be parsed is `conveyor_api.errors.InvalidResource`. Must not know Kopf or the client library.
"""


class ApiError(Exception):
    """`reason` is the API's CamelCase reason ("Invalid", "Forbidden"), `message` its own sentence."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def wants_silence(self) -> bool:
        """Whether another call now is useless: no server answers, it refuses our credentials, or wants fewer calls."""
        return False


class Refused(ApiError):
    """The same call will be refused again."""


class Conflict(ApiError):
    """The object changed, or a field belongs to somebody else."""


class Unavailable(ApiError):
    """The call may succeed later; `retry_after_seconds` if the server named a time."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.retry_after_seconds = retry_after_seconds

    @property
    def wants_silence(self) -> bool:
        return self.status in (0, 401, 429) or self.retry_after_seconds is not None
