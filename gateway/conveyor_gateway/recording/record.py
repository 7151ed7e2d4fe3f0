"""What is said about each request when it has ended: one log line, and counts.

Filled by `relaying` on the way; `Recorder.finish` is called exactly once per request.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Final

from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.watching.catalog import Directory

logger = logging.getLogger("conveyor_gateway.requests")

CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number; in log and metrics only, since the client has gone


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds, `began` on time.monotonic()."""

    request_id: str
    path: str
    began: float = field(default_factory=time.monotonic)
    service: str = ""
    engine: str = "-"
    status: int = 500
    reason: str = "internal_error"  # why no engine answered it to the end; "-": one did
    attempts: int = 0
    waited_seconds: float = 0.0
    first_byte_seconds: float | None = None
    sent_bytes: int = 0

    def age_seconds(self) -> float:
        return time.monotonic() - self.began

    def set_answered(self, status: int) -> None:
        self.status, self.reason = status, "-"

    def set_client_gone(self) -> None:
        self.status, self.reason = CLIENT_CLOSED_REQUEST, "client_gone"


class Recorder:
    """Counts and logs. Services that are no longer in `directory` are counted without a name, as unknown ones are."""

    def __init__(self, metrics: Metrics, directory: Directory) -> None:
        self._metrics = metrics
        self._directory = directory

    def retry(self, record: Record, reason: str, error: Exception) -> None:
        """An engine did not answer, another one is asked."""
        self._metrics.count_retry(self._label(record), reason)
        logger.info(
            "event=retried id=%s service=%s engine=%s error=%s", record.request_id, record.service, record.engine, error
        )

    def first_byte(self, record: Record) -> None:
        record.first_byte_seconds = record.age_seconds()
        self._metrics.observe_answer(self._label(record), record.waited_seconds, record.first_byte_seconds)

    def finish(self, record: Record) -> None:
        label = self._label(record)
        self._metrics.count_request(label, record.status)
        if record.reason != "-":
            self._metrics.count_dropped(label, record.reason)
        logger.info(
            "event=request id=%s service=%s path=%s status=%d reason=%s engine=%s attempts=%d wait_seconds=%.4f "
            "first_byte_seconds=%s seconds=%.4f bytes=%d",
            record.request_id,
            record.service or "-",
            record.path,
            record.status,
            record.reason,
            record.engine,
            record.attempts,
            record.waited_seconds,
            "-" if record.first_byte_seconds is None else f"{record.first_byte_seconds:.4f}",
            record.age_seconds(),
            record.sent_bytes,
        )

    def _label(self, record: Record) -> str:
        return record.service if record.service in self._directory.services else ""
