"""The reasons why an engine, or the fetch of its model, ended: `reason` in its termination message.

The engine writes the reason. The operator reads it and uses it in conditions. docs/api-reference.md explains each.
"""

from enum import StrEnum
from typing import Final


class FailureReason(StrEnum):
    """A reason in CamelCase, as usual in Kubernetes."""

    # The model is missing or cannot be used.
    SECRET_NOT_FOUND = "SecretNotFound"  # of its credentials; the operator also reports it for other Secrets
    MODEL_NOT_FOUND = "ModelNotFound"
    MODEL_DOWNLOAD_FAILED = "ModelDownloadFailed"
    MODEL_UNREADABLE = "ModelUnreadable"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    UNSUPPORTED_MODEL = "UnsupportedModel"
    # The engine cannot run.
    INVALID_CONFIG = "InvalidConfig"
    NO_DEVICE = "NoDevice"
    KV_BUDGET_TOO_LARGE = "KVBudgetTooLarge"
    KV_BUDGET_TOO_SMALL = "KVBudgetTooSmall"
    OUT_OF_MEMORY = "OutOfMemory"
    ENGINE_ERROR = "EngineError"  # an unexpected error
    OOM_KILLED = "OOMKilled"  # the kernel killed the engine process; also Kubernetes' word for containers


OF_THE_MODEL: Final = frozenset(
    {
        FailureReason.SECRET_NOT_FOUND,
        FailureReason.MODEL_NOT_FOUND,
        FailureReason.MODEL_DOWNLOAD_FAILED,
        FailureReason.MODEL_UNREADABLE,
        FailureReason.CHECKSUM_MISMATCH,
        FailureReason.UNSUPPORTED_MODEL,
    }
)
