"""A collector of traces: accepts OTLP over HTTP, decodes it with OpenTelemetry's own protocol, and keeps the spans."""

import contextlib
import gzip
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

SERVER = Span.SpanKind.SPAN_KIND_SERVER


@dataclass(frozen=True)
class Found:
    """A span that was exported. Times are Unix nanoseconds."""

    program: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    is_server: bool
    began: int
    ended: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    has_failed: bool


class AnyCollector:
    """What tests read from a collector. Programs export to `url`."""

    url: str

    def read(self) -> list[bytes]:
        """Return all requests that were accepted, in OTLP's binary format."""
        raise NotImplementedError

    @property
    def spans(self) -> list[Found]:
        return [span for body in self.read() for span in _decode(body)]

    def wait(self, holds: Callable[[list[Found]], bool]) -> list[Found]:
        """Return the spans once the condition is true for them."""
        deadline = time.monotonic() + 60
        while not holds(spans := self.spans):
            assert time.monotonic() < deadline, [(span.program, span.name, span.events) for span in spans]
            time.sleep(0.05)
        return spans


class Collector(AnyCollector):
    """Listens on 127.0.0.1 in `with`. It answers with `status` and `pieces`, and only while `answers` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.pieces: Iterable[bytes] = ()  # the body of each answer
        self.answers = threading.Event()
        self.answers.set()
        self._received: list[bytes] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.answers.wait(60)
                assert self.path == "/v1/traces"
                if outer.status == 200:
                    is_packed = self.headers.get("Content-Encoding") == "gzip"
                    outer._received.append(gzip.decompress(body) if is_packed else body)
                self.send_response(outer.status)
                self.end_headers()  # the end of the connection is that of the body
                with contextlib.suppress(OSError):
                    for piece in outer.pieces:
                        self.wfile.write(piece)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.answers.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def read(self) -> list[bytes]:
        return list(self._received)


def _decode(body: bytes) -> list[Found]:
    request = ExportTraceServiceRequest.FromString(body)
    return [
        Found(
            program=_read(resource.resource.attributes)["service.name"],
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            is_server=span.kind == SERVER,
            began=span.start_time_unix_nano,
            ended=span.end_time_unix_nano,
            attributes=_read(span.attributes),
            events=[(event.name, _read(event.attributes)) for event in span.events],
            has_failed=span.status.code == Status.StatusCode.STATUS_CODE_ERROR,
        )
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _read(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
