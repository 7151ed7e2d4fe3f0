"""Why an engine, or the fetch of its model, ended: the `reason` of its termination message.

Written by the engine, read by the operator, whose conditions carry it on; docs/api-reference.md says what each means.
"""

from enum import StrEnum
from typing import Final


class FailureReason(StrEnum):
    """One CamelCase word, as Kubernetes has them."""

    # The model is missing or cannot be used.
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
    ENGINE_ERROR = "EngineError"  # what nobody expected
    OOM_KILLED = "OOMKilled"  # the kernel ended the engine process; Kubernetes' word for the same of a container


OF_THE_MODEL: Final = frozenset(
    {
        FailureReason.MODEL_NOT_FOUND,
        FailureReason.MODEL_DOWNLOAD_FAILED,
        FailureReason.MODEL_UNREADABLE,
        FailureReason.CHECKSUM_MISMATCH,
        FailureReason.UNSUPPORTED_MODEL,
    }
)
