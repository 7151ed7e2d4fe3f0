"""One client's connection: uvicorn's, with limits on what a client sends and leaves unread. Used by `server`."""

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor_engine.errors import ErrorCode
from conveyor_engine.serving.http.failures import error_body
from conveyor_engine.serving.http.http_parser import HttpParser

CONNECTIONS_MAX = 2048
HEAD_BYTES_MAX = 32 * 2**10  # of the request line and headers together; also of the trailers after a body
HEADERS_MAX = 128
LOOK_SECONDS = 20.0  # in this time a client must read ...
READ_BYTES_MIN = 20 * 2**10  # ... this much of a pending answer; otherwise its connection is closed
PROBE_SECONDS = 0.25
_PIPELINED_MAX = 8  # pipelined requests that wait for the answer to an earlier one
_OTHER_FILES = 128  # file descriptors that are not connections


class Connection(HttpToolsProtocol):
    """Rejects what is not HTTP, has too long a head, or exceeds a limit on connections or pipelined requests.

    The response is an error in OpenAI's format. Then the connection is closed.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._http_parser = HttpParser(self)
        self.parser = self._http_parser  # type: ignore[assignment]
        self._num_bytes = 0  # received since the last piece of a body, or since the end of a request
        self._refusal: tuple[ErrorCode, str] | None = None  # the code and message of the error to send
        self._waits_since = self.loop.time()  # when the connection began to wait for a request
        self._unread_timer, self._head_timer, self._probe_timer = (_Timer(self.loop) for _ in range(3))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()
        if len(self.connections) > min(CONNECTIONS_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES):
            self._make_room()

    def _make_room(self) -> None:
        """Close the connection that has waited longest for its client. If none waits, reject this new connection.

        Connections that wait for a request are closed first, then those that wait for a body, then those with an unread
        answer.
        """
        others: list[Connection] = [c for c in self.connections if c is not self and not c.transport.is_closing()]  # type: ignore[misc]
        if waiting := [c for c in others if c.waits_for_client]:
            min(waiting, key=lambda c: (c.waits_for_client, c._waits_since)).transport.abort()
        else:
            self._refusal = (ErrorCode.TOO_MANY_CONNECTIONS, "too many connections; try again")
            self.send_400_response("")

    @property
    def waits_for_client(self) -> int:
        """What the client must do next. 0: nothing, 1: send a request, 2: send the rest of a body, 3: read."""
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
        if self._http_parser.will_parse_again:
            return
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX:
            self._refuse_head()
            raise ValueError
        if len(self.pipeline) >= _PIPELINED_MAX:
            message = f"at most {_PIPELINED_MAX} pipelined requests may wait on a connection"
            self._refusal = (ErrorCode.TOO_MANY_PIPELINED, message)
            raise ValueError
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not None:
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _AnyLength()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._http_parser.will_parse_again:
            return
        self._num_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._waits_since = self.loop.time()
        super().on_response_complete()

    def _refuse_head(self) -> None:
        message = f"request line and headers may have at most {HEADERS_MAX} headers and {HEAD_BYTES_MAX} bytes in all"
        self._refusal = (ErrorCode.HEADERS_TOO_LARGE, message)

    def send_400_response(self, msg: str) -> None:
        code, message = self._refusal or (ErrorCode.MALFORMED_HTTP, msg)
        status, body = HTTPStatus(code.status), error_body(message, code)
        head = f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data: the client has left, or waits for its answer (half-closed connection).

        Returns True to keep the connection open for the answer; None closes it.
        """
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete or self.pipeline:
            return None  # there is nothing to wait for: the transport closes itself
        if cycle.scope["http_version"] != "1.1":
            return None
        cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Send an interim response regularly until the answer begins.

        A client that has left resets the connection, so the next write fails. Once the answer has
        begun, its own pieces have this effect.
        """
        if not (self.transport.is_closing() or self.cycle.response_started):
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self._probe_timer.start(PROBE_SECONDS, self._probe)

    def pause_writing(self) -> None:
        """Watch how fast the client reads. asyncio calls this when too much is unread."""
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
        """Close a connection whose request head is not complete in time.

        uvicorn itself closes a connection only if the client sends nothing.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_timer.stop()
        elif not self._head_timer.runs:
            self._head_timer.start(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _expect_reading(self, num_unread_before: int | None = None) -> None:
        """Close the connection if the client has read too little since the last check.

        Without this limit, unread answers would accumulate in memory.
        """
        num_unread = self.transport.get_write_buffer_size()
        if num_unread_before is not None and num_unread > num_unread_before - READ_BYTES_MIN:
            self.transport.abort()
        else:
            self._unread_timer.start(LOOK_SECONDS, lambda: self._expect_reading(num_unread))


class _AnyLength(int):
    """The length of an answer whose end is the end of the connection, because HTTP/1.0 has no chunks.

    uvicorn subtracts what it has sent, and compares the rest with zero at the end.
    """

    def __sub__(self, num_bytes: int) -> "_AnyLength":
        return self

    def __lt__(self, num_bytes: int) -> bool:
        return False


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
