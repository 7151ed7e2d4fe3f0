"""Records each request after its end with a log line and metrics.

`relaying` fills the record while the request runs, and calls `Recorder.finish` exactly once for each request.
"""

import itertools
import logging
import secrets
import socket
import time
from collections.abc import Container
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from multidict import CIMultiDictProxy

from conveyor_gateway.metering.meters import MeteredRequest
from conveyor_gateway.recording.metrics import Metrics
from conveyor_gateway.recording.receipts import Receipts
from conveyor_gateway.recording.request_trace import RequestTrace
from conveyor_gateway.recording.usage_book import UsageBook
from conveyor_gateway.watching.catalog import Directory
from conveyor_process.tracing import TRACE_PARENT_HEADER, enter_trace
from conveyor_protocol.gen_ai import describe_operation
from conveyor_protocol.usage import RequestReceipt, UsedTokens, describe_used

if TYPE_CHECKING:
    from conveyor_process.otlp import Tracer

logger = logging.getLogger("conveyor_gateway.requests")

OWN_NAME: Final = socket.gethostname()
_PROCESS: Final = secrets.token_hex(8)
_NUMBERS: Final = itertools.count()
CLIENT_CLOSED_REQUEST: Final = 499  # nginx's number; only for log and metrics, because the client has left


@dataclass(slots=True)
class Record:
    """One request. Times are in seconds; `began` is a time.monotonic() value."""

    request_id: str
    path: str
    client: str  # its name or address
    has_name: bool = False  # `client` is a name: of a caller, or one that a trusted proxy has given
    owner: str = ""  # of the caller's key, as `NAMESPACE/OWNER`
    began: float = field(default_factory=time.monotonic)
    metered: MeteredRequest | None = None  # None: no limit of requests or tokens
    service: str = ""
    request_class: str = ""  # empty without classes
    wants_receipt: bool = False
    is_lowered: bool = False  # the client named a more urgent class than allowed
    engine: str = "-"
    status: int = 500
    reason: str = "internal_error"  # why no engine returned a complete answer; "-" if one did
    attempts: int = 0
    num_refused: int = 0  # attempts that the engine refused before it processed anything
    waited_seconds: float = 0.0
    first_byte_seconds: float | None = None
    sent_bytes: int = 0
    usage: UsedTokens | None = None
    usage_key: str = field(default_factory=lambda: f"{_PROCESS}{next(_NUMBERS):x}")  # identifies the request at engines
    awaits_usage: bool = False  # the engine may still send a newer report than `usage`
    engine_seconds: float = 0.0
    seconds: float = 0.0  # from arrival to end
    trace: RequestTrace | None = None  # None: traces are not exported
    _engine_began: float | None = None

    @property
    def was_processed(self) -> bool:
        """Whether an engine has, or may have, processed the request. Otherwise it counts for no limit and no usage."""
        return self.attempts > self.num_refused

    def age_seconds(self) -> float:
        return time.monotonic() - self.began

    def enter_queue(self) -> None:
        """Record that the request waits for an engine."""
        if self.trace is not None:
            self.trace.enter("queue", time.monotonic())

    def enter_engine(self, address: str) -> None:
        """Record that the request is sent to this engine."""
        self.engine, self.awaits_usage, self._engine_began = address, True, time.monotonic()
        self.attempts += 1
        if self.trace is not None:
            self.trace.enter("dispatch", self._engine_began, {"conveyor.engine": address})

    def leave_engine(self, usage: UsedTokens | None, awaits_usage: bool = False) -> None:
        """Record that the request has left its engine. `awaits_usage`: the engine may still report its usage."""
        if self._engine_began is not None:
            self.engine_seconds += time.monotonic() - self._engine_began
            self._engine_began = None
        self.usage, self.awaits_usage = usage, awaits_usage

    def end(self) -> None:
        self.seconds = self.age_seconds()
        self.leave_engine(self.usage, self.awaits_usage)

    def set_answered(self, status: int) -> None:
        self.status, self.reason = status, "-"

    def set_client_gone(self) -> None:
        self.status, self.reason = CLIENT_CLOSED_REQUEST, "client_gone"


class Recorder:
    """Writes log lines, metrics and spans. Services that are not in `directory` any more are counted without a name."""

    def __init__(
        self,
        metrics: Metrics,
        directory: Directory,
        keys: Container[str],
        book: UsageBook,
        tracer: "Tracer | None" = None,
    ) -> None:
        """keys: the names of all APIKeys. tracer: None if traces are not exported."""
        self._keys = keys
        self._metrics = metrics
        self._book = book
        self._tracer = tracer
        self.receipts = Receipts()
        self._directory = directory

    def begin(self, record: Record, headers: CIMultiDictProxy[str]) -> None:
        """Begin the span of a request with these headers, if traces are exported."""
        if self._tracer is None:
            return
        span = self._tracer.start(f"POST {record.path}", record.began, headers.get(TRACE_PARENT_HEADER, ""))
        record.trace = RequestTrace(span, record.began)
        if span.is_recording:
            enter_trace(span.header)

    def retry(self, record: Record, reason: str, error: Exception) -> None:
        """Record that an engine did not answer, so the request is sent to another one."""
        self._metrics.count_retry(self._label(record), reason)
        logger.info(
            "event=retried id=%s service=%s engine=%s error=%s", record.request_id, record.service, record.engine, error
        )
        if record.trace is not None:
            record.trace.note("retry", time.monotonic(), {"conveyor.reason": reason})
            record.enter_queue()

    def first_byte(self, record: Record) -> None:
        record.first_byte_seconds = record.age_seconds()
        if record.trace is not None:
            record.trace.note("first_byte", record.began + record.first_byte_seconds)
            record.trace.enter("stream", record.began + record.first_byte_seconds)
        self._metrics.observe_answer(self._label(record), record.waited_seconds, record.first_byte_seconds)
        service = self._directory.services.get(record.service)
        if service is not None and record.request_class in service.classes.names:
            self._metrics.observe_class_wait(record.service, record.request_class, record.waited_seconds)

    def finish(self, record: Record) -> None:
        label, used = self._label(record), record.usage
        if record.metered is not None:
            if record.was_processed:
                record.metered.settle(used)
            else:
                record.metered.give_back()
        self._metrics.count_request(label, record.status)
        if record.reason != "-":
            self._metrics.count_dropped(label, record.reason)
        if record.is_lowered:
            self._metrics.count_lowered(label)
        if record.was_processed:
            self._metrics.count_used(label, record.engine_seconds, record.usage)
            caller = record.client if record.has_name else ""
            self._book.count(label, caller, record.request_class, record.usage)
            if record.has_name and self._may_have_series(record.client):
                named = label, record.client, record.request_class, record.owner
                self._metrics.count_used_by_client(named, record.usage)
        logger.info(
            "event=request id=%s service=%s client=%s path=%s status=%d reason=%s engine=%s attempts=%d "
            "wait_seconds=%.4f first_byte_seconds=%.4f engine_seconds=%.4f seconds=%.4f bytes=%d prompt_tokens=%d "
            "cached_tokens=%d completion_tokens=%d",
            record.request_id,
            record.service or "-",
            record.client,
            record.path,
            record.status,
            record.reason,
            record.engine,
            record.attempts,
            record.waited_seconds,
            record.first_byte_seconds,
            record.engine_seconds,
            record.seconds,
            record.sent_bytes,
            *((None, None, None) if used is None else (used.prompt_tokens, used.cached_tokens, used.completion_tokens)),
        )
        if used is not None and used.receipt is not None and logger.isEnabledFor(logging.DEBUG):
            values = msgspec.structs.astuple(used.receipt)
            logger.debug(
                "event=receipt id=%s engine_ms=%.3f padding_ms=%.3f queue_ms=%.1f batch_wait_ms=%.1f prefill_ms=%.1f "
                "decode_ms=%.1f neighbours=%.1f preempted=%d closed_by=%s",
                record.request_id,
                *values,
            )
        if record.trace is not None and record.trace.is_recording and record.service:
            record.trace.end(record.began + record.seconds, _describe(record), _find_error(record))
        self.receipts.add(_build_receipt(record))

    def _may_have_series(self, client: str) -> bool:
        """Return False for an APIKey that was deleted while its request ran: nothing would drop the series again."""
        is_key = "/" in client and ":" not in client  # a proxy's name and a ServiceAccount's have a colon
        return not is_key or client in self._keys

    def _label(self, record: Record) -> str:
        return record.service if record.service in self._directory.services else ""


def _find_error(record: Record) -> str:
    """Return why the request failed, also after its answer began; "" if it did not, or by the client's fault."""
    if 400 <= record.status < 500:
        return ""
    if record.reason != "-":
        return record.reason
    if record.usage is not None and record.usage.error:
        return record.usage.error
    return str(record.status) if record.status >= 500 else ""


def _describe(record: Record) -> dict[str, str | int | float]:
    """Return the attributes of the request's span."""
    attributes: dict[str, str | int | float] = {
        **describe_operation(record.path),
        "http.request.method": "POST",
        "http.response.status_code": record.status,
        "conveyor.request_id": record.request_id,
        "conveyor.service": record.service,
        "conveyor.attempts": record.attempts,
    }
    if record.request_class:
        attributes["conveyor.class"] = record.request_class
    if record.first_byte_seconds is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = record.first_byte_seconds
    return attributes if record.usage is None else attributes | describe_used(record.usage)


def _build_receipt(record: Record) -> RequestReceipt:
    return RequestReceipt(
        request_id=record.request_id,
        service=record.service,
        path=record.path,
        client=record.client,
        gateway=OWN_NAME,
        engine=record.engine,
        status=record.status,
        reason=record.reason,
        attempts=record.attempts,
        ended_unix=time.time(),
        seconds=record.seconds,
        queue_seconds=record.waited_seconds,
        first_byte_seconds=record.first_byte_seconds,
        engine_seconds=record.engine_seconds,
        used=record.usage,
    )
