"""Everything that this server refuses, each with the HTTP status of its answer.

MetricsError
├── Unauthenticated   401  no certificate of the front proxy, or no user named by it
├── NotFound          404  no such resource, metric or InferenceService
└── NotKnown          503  the value exists, but cannot be known now: the HorizontalPodAutoscaler holds

InvalidTrust (the API server publishes no usable front proxy authority) and `conveyor_process.settings.SettingsError` (a
wrong flag or variable) reach no client; they are logged, with what to do.
"""


class MetricsError(Exception):
    """A question that gets a `metav1.Status` instead of a value."""

    status: int
    reason: str


class Unauthenticated(MetricsError):
    status = 401
    reason = "Unauthorized"


class NotFound(MetricsError):
    status = 404
    reason = "NotFound"


class NotKnown(MetricsError):
    status = 503
    reason = "ServiceUnavailable"


class InvalidTrust(Exception):
    """ConfigMap kube-system/extension-apiserver-authentication does not say whom to trust."""
