"""The operator's exceptions, in one hierarchy.

    ApiError            a call to the API server failed
    ├── Refused         it will be refused again until somebody changes something: 400, 403, 422, ...
    ├── Conflict        the object has changed meanwhile; look again and retry: 409
    └── Unavailable     it may succeed later: 401, 429, 5xx, no connection, no answer in time

`cluster` raises them, `reconcile` reports them in a condition, and `workers` retries. The error for a resource that
cannot be parsed is `conveyor_api.errors.InvalidResource`. This module must not import Kopf or the client library.
"""


class ApiError(Exception):
    """A failed call. `reason` is the API's CamelCase reason ("Invalid", "Forbidden"), and `message` its sentence."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def wants_silence(self) -> bool:
        """Whether other calls would fail too: the API server is down, rejects the credentials or limits calls."""
        return False


class Refused(ApiError):
    """The API server refuses the call, and would refuse it again."""

    @property
    def is_of_leaving_namespace(self) -> bool:
        """Whether nothing can be created in the namespace, because it is being deleted."""
        return self.status == 403 and "because it is being terminated" in self.message


class Conflict(ApiError):
    """The object has changed, or a field belongs to another manager."""


class Unavailable(ApiError):
    """The call may succeed later. `retry_after_seconds`: the pause that the server requests, or None."""

    def __init__(self, status: int, reason: str, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.retry_after_seconds = retry_after_seconds

    @property
    def wants_silence(self) -> bool:
        return self.status in (0, 401, 429) or self.retry_after_seconds is not None
