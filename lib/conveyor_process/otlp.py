"""Spans of OpenTelemetry, exported by OTLP over HTTP. `spans` imports this module if there is a collector.

Spans are made of times that are already known, so no code runs inside a span. A thread exports them in batches. If its
queue is full, or if the collector does not accept a batch, spans are lost and counted; no caller waits. All times are
those of `time.monotonic`.
"""

import io
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import requests
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from requests.adapters import HTTPAdapter

from conveyor_process.tracing import TraceParent, parse_trace_parent

Attributes = Mapping[str, str | int | float | bool]

_QUEUE_SPANS: Final = 2048  # the standard's default for OTEL_BSP_MAX_QUEUE_SIZE
_FLUSH_SECONDS: Final = 3.0  # how long the last spans may delay the end of the process
_ANSWER_BYTES: Final = 64 * 2**10  # of a collector, at most
_SCOPE: Final = InstrumentationScope("conveyor")
_OK, _ERROR = Status(), Status(StatusCode.ERROR)


class Tracer:
    """Makes the spans of one process, and exports those that the sampler of OTEL_TRACES_SAMPLER chooses."""

    def __init__(self, program: str) -> None:
        """Start the thread that exports. Raises ValueError if a variable OTEL_* is invalid."""
        own = Resource({"service.name": program, "service.instance.id": socket.gethostname()})
        provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        self.resource = provider.resource
        self.sampler = provider.sampler
        self.ids = provider.id_generator
        self.queue = _Queue(_Exporter())

    def start(self, name: str, began: float, header: str | None = None) -> "OpenSpan":
        """Return a new span.

        header: `traceparent` of a request, which may be missing (""), invalid or forged; None: it serves no request.
        """
        parent = parse_trace_parent(header) if header else None
        return OpenSpan(self, name, began, SpanKind.INTERNAL if header is None else SpanKind.SERVER, parent)

    @property
    def num_lost(self) -> int:
        """Number of sampled spans that no collector got."""
        return self.queue.num_lost

    def shut_down(self) -> None:
        """Export the last spans, for at most a few seconds."""
        flushing = threading.Thread(target=self.queue.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)


class OpenSpan:
    """A span that has not ended. Unless it is sampled (`is_recording`), nothing is kept of it."""

    __slots__ = ("_clock_seconds", "_context", "_events", "_kind", "_name", "_parent", "_start", "_tracer",
                 "is_recording")  # fmt: skip

    def __init__(self, tracer: Tracer, name: str, began: float, kind: SpanKind, parent: TraceParent | None) -> None:
        self._tracer, self._name, self._kind = tracer, name, kind
        self._clock_seconds = time.time() - time.monotonic()
        self._start = self._find_ns(began)
        self._events: list[Event] = []
        self._parent: SpanContext | None = None
        context, trace_id = Context(), 0
        if parent is None:
            trace_id = tracer.ids.generate_trace_id()
        else:
            trace_id = int(parent.trace_id, 16)
            self._parent = SpanContext(trace_id, int(parent.span_id, 16), True, TraceFlags(parent.flags))
            context = set_span_in_context(NonRecordingSpan(self._parent), context)
        decision = tracer.sampler.should_sample(context, trace_id, name, kind).decision
        self.is_recording = decision is Decision.RECORD_AND_SAMPLE
        self._context = self._build_context(trace_id)

    @property
    def has_parent(self) -> bool:
        """Whether the span continues the caller's trace."""
        return self._parent is not None

    @property
    def header(self) -> str:
        """The header `traceparent` for what this span calls."""
        context = self._context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def add_event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        """Add a point in time."""
        if self.is_recording:
            self._events.append(Event(name, attributes, self._find_ns(at)))

    def add_part(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        """Add a span below this one, which has ended."""
        if self.is_recording:
            context = self._build_context(self._context.trace_id)
            self._tracer.queue.on_end(
                ReadableSpan(
                    name, context, self._context, self._tracer.resource, attributes,
                    start_time=self._find_ns(began), end_time=self._find_ns(max(began, ended)),
                    instrumentation_scope=_SCOPE,
                )
            )  # fmt: skip

    def end(self, ended: float, attributes: Attributes, error: str = "") -> None:
        """End the span and queue it for the export. error: the kind of failure; empty: none."""
        if self.is_recording:
            given = {**attributes, "error.type": error} if error else attributes
            self._tracer.queue.on_end(
                ReadableSpan(
                    self._name, self._context, self._parent, self._tracer.resource, given, self._events, (), self._kind,
                    status=_ERROR if error else _OK, start_time=self._start, end_time=self._find_ns(ended),
                    instrumentation_scope=_SCOPE,
                )
            )  # fmt: skip

    def _build_context(self, trace_id: int) -> SpanContext:
        flags = TraceFlags(TraceFlags.SAMPLED if self.is_recording else TraceFlags.DEFAULT)
        return SpanContext(trace_id, self._tracer.ids.generate_span_id(), False, flags)

    def _find_ns(self, at: float) -> int:
        """Return the Unix time in nanoseconds."""
        return int((at + self._clock_seconds) * 1e9)


class _Adapter(HTTPAdapter):
    """Reads a bounded part of a collector's answers, and takes only those of OTLP. The SDK takes any below 400."""

    num_rejected = 0  # of the last batch, by an answer that is a success

    def send(self, *args: Any, **kwargs: Any) -> requests.Response:
        """Return the answer without its body. Any error, also of protobuf, makes the SDK count the batch as failed."""
        deadline = time.monotonic() + kwargs["timeout"]
        answer = super().send(*args, **kwargs)
        raw, answer.raw = answer.raw, io.BytesIO()  # the session would read any body to its end
        with raw:
            if answer.status_code >= 400:
                return answer
            if answer.status_code >= 300:
                raise requests.HTTPError(f"the collector's status is {answer.status_code}")
            body = _read(raw, deadline)
        self.num_rejected = ExportTraceServiceResponse.FromString(body).partial_success.rejected_spans
        return answer


def _read(raw: Any, deadline: float) -> bytes:
    body: bytes = b""
    while piece := raw.read1(_ANSWER_BYTES, decode_content=False):
        body += piece
        if len(body) > _ANSWER_BYTES:
            raise requests.HTTPError(f"the collector's answer has more than {_ANSWER_BYTES} bytes")
        if time.monotonic() > deadline:
            raise requests.Timeout("the collector's answer has not ended in time")
    return body


class _Exporter(OTLPSpanExporter):
    """Counts the spans that it was given, and those that the collector has not accepted."""

    def __init__(self) -> None:
        self._adapter = _Adapter()
        session = requests.Session()
        session.headers["Accept-Encoding"] = "identity"
        for scheme in ("http://", "https://"):
            session.mount(scheme, self._adapter)
        super().__init__(session=session)
        self.num_given = self.num_rejected = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_given += len(spans)
        result = SpanExportResult.FAILURE
        try:
            result = super().export(spans)
        finally:
            is_taken = result is SpanExportResult.SUCCESS
            num_rejected = self._adapter.num_rejected if is_taken else len(spans)
            self.num_rejected += max(0, min(num_rejected, len(spans)))
        return result


class _Queue(BatchSpanProcessor):
    """The bounded queue of the exporting thread. Drops new spans while it is full."""

    def __init__(self, exporter: _Exporter) -> None:
        self._size = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE") or _QUEUE_SPANS)
        super().__init__(exporter, self._size)
        self._exporter = exporter
        self._num_queued = self._num_dropped = 0  # since the start

    @property
    def num_lost(self) -> int:
        return self._num_dropped + self._exporter.num_rejected

    def on_end(self, span: ReadableSpan) -> None:
        # BatchSpanProcessor would log each span that it drops.
        if self._num_queued - self._exporter.num_given >= self._size:
            self._num_dropped += 1
            return
        self._num_queued += 1
        super().on_end(span)
