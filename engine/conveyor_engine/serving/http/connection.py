"""One client's connection: uvicorn's, with bounds for what clients send and leave unread. Used by `server`."""

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor_engine.errors import ErrorCode
from conveyor_engine.serving.http.failures import error_body

CONNECTIONS_MAX = 2048
HEAD_BYTES_MAX = 32 * 2**10  # request line and headers; the trailers after a body too
HEADERS_MAX = 128
LOOK_SECONDS = 20.0  # in which a client must read ...
READ_BYTES_MIN = 20 * 2**10  # ... so much of an answer that waits for it, or its connection is closed
PROBE_SECONDS = 0.25
_PIPELINED_MAX = 8  # requests that wait for the answer to one before them
_OTHER_FILES = 128  # open files that are no connections


class Connection(HttpToolsProtocol):
    """Answers what is too long or is not HTTP with an error in OpenAI's form, and closes."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_bytes = 0  # since the last piece of a body, or the end of a request
        self._refusal: tuple[ErrorCode, str] | None = None  # and its message
        self._waits_since = self.loop.time()  # for a head
        self._unread_timer, self._head_timer, self._probe_timer = (_Timer(self.loop) for _ in range(3))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES):
            self._make_room()

    def _make_room(self) -> None:
        """Closes the connection that has waited longest for its client.

        Those that wait for a request go first, then those that wait for a body, then those whose answer is not read.
        """
        others: list[Connection] = [c for c in self.connections if c is not self and not c.transport.is_closing()]  # type: ignore[misc]
        if waiting := [c for c in others if c.waits_for_client]:
            min(waiting, key=lambda c: (c.waits_for_client, c._waits_since)).transport.abort()
        else:
            self._refusal = (ErrorCode.TOO_MANY_CONNECTIONS, "too many connections; try again")
            self.send_400_response("")

    @property
    def waits_for_client(self) -> int:
        """0: it does not, 1: for a request, 2: for the rest of a body, 3: to read its answer."""
        if self.cycle is None or (self.cycle.response_complete and not self.pipeline):
            return 3 if self.transport.get_write_buffer_size() else 1
        return 2 if self.cycle.more_body else 0

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        self._expect_head()
        if self._num_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse_head()
            self.send_400_response("")

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > HEADERS_MAX:
            self._refuse_head()
            raise ValueError  # stops the parser; uvicorn then calls send_400_response

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX:
            self._refuse_head()
            raise ValueError
        if len(self.pipeline) >= _PIPELINED_MAX:
            message = f"at most {_PIPELINED_MAX} requests may wait on a connection for the answer to one before them"
            self._refusal = (ErrorCode.TOO_MANY_PIPELINED, message)
            raise ValueError
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def _refuse_head(self) -> None:
        message = f"request line and headers may be {HEADERS_MAX} headers and {HEAD_BYTES_MAX} bytes together"
        self._refusal = (ErrorCode.HEADERS_TOO_LARGE, message)

    def send_400_response(self, msg: str) -> None:
        code, message = self._refusal or (ErrorCode.MALFORMED_HTTP, msg)
        status, body = HTTPStatus(code.status), error_body(message, code)
        head = f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more: it has left, or it only waits for its answer (a half-closed connection)."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.pipeline:
            return None  # there is nothing to wait for: the transport closes itself
        if cycle.scope["http_version"] != "1.1":
            return None
        cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Sends an interim answer: a client that has left resets the connection, and the next write fails.

        Once the answer has begun, its own pieces do the same.
        """
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self._probe_timer.start(PROBE_SECONDS, self._probe)

    def pause_writing(self) -> None:
        """Begins to watch how fast the client reads: too much is unread."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_timer.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._unread_timer, self._head_timer, self._probe_timer):
            timer.stop()

    def _expect_head(self) -> None:
        """Closes a connection that sends no whole head in time; uvicorn closes only one that sends nothing."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.stop()
        elif not self._head_timer.runs:
            self._head_timer.start(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _expect_reading(self, num_unread_before: int | None = None) -> None:
        """Closes the connection if too little was read since the last look, so that answers do not pile up here."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread_before is not None and num_unread > num_unread_before - READ_BYTES_MIN:
            self.transport.abort()
        else:
            self._unread_timer.start(LOOK_SECONDS, lambda: self._expect_reading(num_unread))


class _Timer:
    """A timer that fires at most once."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._handle: asyncio.TimerHandle | None = None

    @property
    def runs(self) -> bool:
        return self._handle is not None

    def start(self, seconds: float, due: Callable[[], None]) -> None:
        self.stop()
        self._handle = self._loop.call_later(seconds, due)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
