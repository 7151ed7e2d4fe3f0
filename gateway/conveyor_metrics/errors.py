"""Everything that this server refuses: one table, `Reason`, and the kinds that it is raised as.

MetricsError
├── Unauthenticated   no certificate of the front proxy, or no user named by it
├── NotFound          no such resource, metric or InferenceService
└── NotKnown          the value exists, but cannot be known now: the HorizontalPodAutoscaler holds

InvalidTrust (the API server publishes no usable front proxy authority) and `conveyor_process.settings.SettingsError` (a
wrong flag or variable) reach no client; they are logged, with what to do.
"""

from typing import ClassVar

from conveyor_protocol.answer_codes import AnswerCode


class Reason(AnswerCode):
    """Kubernetes' word for each case."""

    BAD_REQUEST = "BadRequest", 400, "the request is not valid HTTP"
    UNAUTHORIZED = "Unauthorized", 401, "the caller is not the API server's front proxy, or names no user"
    NOT_FOUND = "NotFound", 404, "no such path or metric, or no gateway knows the InferenceService"
    METHOD_NOT_ALLOWED = "MethodNotAllowed", 405, "only GET is supported"
    INTERNAL_ERROR = "InternalError", 500, "a bug in the metrics server; its log has the traceback"
    SERVICE_UNAVAILABLE = (
        "ServiceUnavailable",
        503,
        "a gateway does not answer, so the sum is not known; the HPA keeps the replicas",
    )


class MetricsError(Exception):
    """A question that gets a `metav1.Status` instead of a value."""

    reason: ClassVar[Reason]


class Unauthenticated(MetricsError):
    reason = Reason.UNAUTHORIZED


class NotFound(MetricsError):
    reason = Reason.NOT_FOUND


class NotKnown(MetricsError):
    reason = Reason.SERVICE_UNAVAILABLE


class InvalidTrust(Exception):
    """ConfigMap kube-system/extension-apiserver-authentication does not say whom to trust."""
