"""The server's error responses: the table `StatusReason`, and the exceptions.

MetricsError
├── Unauthenticated   the caller has no certificate of the front proxy, or names no user
├── NotFound          no such resource, metric or InferenceService
└── NotKnown          the value cannot be read now, so the HorizontalPodAutoscaler keeps the replicas

InvalidTrust (the API server publishes no usable front proxy authority) and `conveyor_process.settings.SettingsError`
(an invalid flag or variable) are not sent to clients. The server logs or prints their messages, which say what to do.
"""

from typing import ClassVar

from conveyor_protocol.answer_codes import AnswerCode


class StatusReason(AnswerCode):
    """Kubernetes' reason for each error, with its HTTP status and meaning."""

    BAD_REQUEST = "BadRequest", 400, "the request is not valid HTTP"
    UNAUTHORIZED = "Unauthorized", 401, "the caller is not the API server's front proxy, or names no user"
    NOT_FOUND = "NotFound", 404, "no such path or metric, or no gateway knows the InferenceService"
    METHOD_NOT_ALLOWED = "MethodNotAllowed", 405, "only GET is supported"
    INTERNAL_ERROR = "InternalError", 500, "a bug in the metrics server; its log has the traceback"
    SERVICE_UNAVAILABLE = (
        "ServiceUnavailable",
        503,
        "a gateway does not answer, so the sum over all gateways is unknown; the HPA keeps the replicas or scales up",
    )


class MetricsError(Exception):
    """An error that is returned as a `metav1.Status`."""

    reason: ClassVar[StatusReason]


class Unauthenticated(MetricsError):
    reason = StatusReason.UNAUTHORIZED


class NotFound(MetricsError):
    reason = StatusReason.NOT_FOUND


class NotKnown(MetricsError):
    reason = StatusReason.SERVICE_UNAVAILABLE


class InvalidTrust(Exception):
    """ConfigMap kube-system/extension-apiserver-authentication has no usable authority."""
