"""One HTTP connection from an untrusted client: aiohttp's connection, with limits that aiohttp does not have.

- A head (request line and headers) has a limit in bytes and in time.
- One turn of the event loop parses a limited number of bytes for each connection, and chunks must not be tiny.
- One request is read at a time. Pipelined requests stay unparsed, within a limit for the whole port.
- The unread part of an answer is buffered up to a limit, and a client must not stop reading for long.

Created by a port (`server`), which limits the number of connections. Only this file uses aiohttp's protocol internals.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http import HttpRequestParser, HttpVersion11, RawRequestMessage
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestPayloadError, _ErrInfo

from conveyor_http.framing import FREE_CHUNKS, MIN_CHUNK_BYTES, Framing, UnknownCoding, find_coding_error
from conveyor_process.listening import name_peer

MAX_LINE_BYTES: Final = 8 << 10  # of the request line, and of each header
MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 32 << 10  # of the request line and all headers
HEAD_SECONDS: Final = 10.0  # how long a head may take to arrive
MAX_UNREAD_BYTES: Final = 32 << 10  # of an answer, buffered in this process; beyond it, the writer waits
UNREAD_SECONDS: Final = 30.0  # while a writer waits, the client must read half of MAX_UNREAD_BYTES in this time
PROBE_SECONDS: Final = 0.5  # between probes of a client that has half-closed its connection
MAX_AHEAD_BYTES: Final = 8 << 20  # of pipelined requests, on all connections of a port
PIECE_BYTES: Final = 16 << 10  # parsed for a connection in one turn of the event loop
_READ_BUFFER_BYTES: Final = 64 << 10
_OPTIONS: Final[dict[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "lingering_time": 1.0,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
    "max_line_size": MAX_LINE_BYTES,
    "read_bufsize": _READ_BUFFER_BYTES,
    "tcp_keepalive": True,
}


class Port(web.Server, ABC):
    """The part of a port that its connections use."""

    ahead_bytes: int  # unparsed bytes of pipelined requests, on all its connections
    keep_alive_seconds: float  # maximum pause between two requests of a connection

    @abstractmethod
    def make_room(self) -> bool:
        """Return whether the port may have one more connection."""


class Connection(web.RequestHandler):
    """One connection. Subclasses define the responses to rejected requests: `full_answer` and `refuse`."""

    __slots__ = (
        "_ahead",
        "_framing",
        "_has_turn",
        "_head_bytes",
        "_is_answering",
        "_last_body",
        "_port",
        "_probe_timer",
        "_takes_interim",
        "_unparsed",
        "_unread_bytes",
        "_unread_check",
        "is_kept",
        "owner",
        "peer",
        "silent_since",
    )

    full_answer = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

    def __init__(self, port: Port) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(port, loop=loop, keepalive_timeout=port.keep_alive_seconds, **_OPTIONS)
        self._parser = HttpRequestParser(
            self,
            loop,
            _READ_BUFFER_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=RequestPayloadError,
            auto_decompress=False,
            max_msg_queue_size=1,  # the parser stops after each request
        )
        self._port = port
        self._ahead = b""  # bytes that arrived after the current request
        self._unparsed = b""  # bytes that a later turn of the event loop parses
        self._has_turn = False  # whether such a turn is scheduled
        self._framing: Framing | None = None  # of a chunked body that is arriving
        self._head_bytes = 0  # bytes of the incomplete head
        self._is_answering = False
        self._last_body: StreamReader = EMPTY_PAYLOAD  # of the last parsed request
        self._probe_timer: asyncio.TimerHandle | None = None
        self._takes_interim = False  # whether the last request's client understands interim answers
        self._unread_bytes = 0  # unread bytes of the answer at the last check
        self._unread_check: asyncio.TimerHandle | None = None
        self.is_kept: bool | None = None  # set by handlers that decide themselves whether the connection may be closed
        self.owner = ""  # set by handlers: for whom the last request was
        self.peer = ""
        self.silent_since = loop.time()

    @property
    def waits_for_client(self) -> bool:
        """Whether this connection waits for its client to send or to read, so that it may be closed for a new one."""
        if self.is_kept is not None:
            return not self.is_kept
        return not self._has_request() or self.writing_paused

    def _has_request(self) -> bool:
        """Return whether a whole request has arrived whose answer is not complete yet."""
        return self._is_answering and self._last_body.is_eof()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        opened = cast(asyncio.Transport, transport)
        if not self._port.make_room():
            opened.write(self.full_answer)
            opened.close()
            return
        address = opened.get_extra_info("peername")
        self.peer = name_peer(address[0]) if address else ""
        opened.set_write_buffer_limits(MAX_UNREAD_BYTES)
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._take_ahead()
        for timer in (self._unread_check, self._probe_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data: the client has left, or waits for its answer (half-closed connection).

        Returns True to keep the connection open; None closes it.
        """
        may_wait = self._takes_interim and self._has_request() and not (self._ahead or self._has_begun())
        if not may_wait or self.ssl_context is not None:
            return None  # the transport closes itself
        self._close = True  # closes the connection after the answer
        self._probe_timer = self._loop.call_later(PROBE_SECONDS, self._probe)
        return True

    def _has_begun(self) -> bool:
        return self._current_request is not None and self._current_request.writer.output_size > 0

    def _probe(self) -> None:
        """Send an interim answer. A client that has left resets the connection, so the next write fails."""
        if self.transport is not None and self._current_request is not None and not self._has_begun():
            self.transport.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            self._probe_timer = self._loop.call_later(PROBE_SECONDS, self._probe)

    def drop(self) -> None:
        """Close the connection immediately. The unread part of its answer is lost."""
        if self.transport is not None:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.silent_since = self._loop.time()
        self._check_reader_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.silent_since = self._loop.time()
        if self._unread_check is not None:
            self._unread_check.cancel()

    def _check_reader_later(self) -> None:
        assert self.transport is not None, "only an open connection is written to"
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._unread_check = self._loop.call_later(UNREAD_SECONDS, self._check_reader)

    def _check_reader(self) -> None:
        """Drop a client that has read less than half a buffer since the last check."""
        if self.transport is None:
            return
        if self.transport.get_write_buffer_size() > self._unread_bytes - MAX_UNREAD_BYTES // 2:
            self.drop()
        else:
            self._check_reader_later()

    def data_received(self, data: bytes) -> None:
        """Parse a piece of the data. Later turns of the loop parse the rest, so that other connections are served."""
        if data:
            self.silent_since = self._loop.time()
        elif not self._has_request():
            self._read(b"")  # aiohttp continues with buffered data
        if self._unparsed:
            self._pause_reading_for_buffer()
        self._unparsed += data
        if not self._has_turn:
            self._parse()

    def _parse(self) -> None:
        """Pass a piece to aiohttp, which stops after each request. A head that exceeds its limit is rejected."""
        data, self._unparsed, self._has_turn = self._unparsed, b"", False
        if self._close and self._buffer_paused:
            self._resume_reading_for_buffer()  # what comes is dropped
        if not data or self._close or self._force_close:
            return
        if self._has_request():
            self._keep(data)
            return
        if self._reading_paused:  # aiohttp calls `data_received` when it continues
            self._unparsed = data
            return
        room = MAX_HEAD_BYTES - self._head_bytes if self._last_body.is_eof() else PIECE_BYTES
        piece, self._unparsed = data[: min(room, PIECE_BYTES)], data[min(room, PIECE_BYTES) :]
        self._read(piece)
        if self._head_bytes == MAX_HEAD_BYTES:
            self._refuse(LineTooLong("", MAX_HEAD_BYTES))
        if self._unparsed and not self._close:
            self._pause_reading_for_buffer()
            self._has_turn = True
            self._loop.call_soon(self._parse)
        elif self._buffer_paused:
            self._resume_reading_for_buffer()

    def _read(self, data: bytes) -> None:
        is_head, known = self._last_body.is_eof(), self._request_count
        super().data_received(data)
        if self._request_count > known:
            message, self._last_body = self._messages[-1]
            self._head_bytes, self._is_answering = 0, True
            if isinstance(message, RawRequestMessage):
                self._begin(message)
        elif is_head and data:
            if not self._head_bytes:
                self._expect_head()
            self._head_bytes += len(data)
        elif not is_head and self._last_body.is_eof() and not self._is_answering:
            self._read(b"")  # the parser has stopped at the end of an unread body
        elif self._framing is not None and self._framing.feed(len(data)):
            self._check_framing(self._framing)

    def _begin(self, message: RawRequestMessage) -> None:
        """Prepare for the body of a request whose head has arrived."""
        self._takes_interim = message.version >= HttpVersion11
        self._framing = Framing(self._last_body) if message.chunked else None
        if (error := find_coding_error(message)) is not None:
            self._messages.pop()
            self._refuse(error)

    def _check_framing(self, framing: Framing) -> None:
        if self._close or self._reading_paused or self._last_body.is_eof() or not framing.is_excessive():
            return
        message = f"after {FREE_CHUNKS} chunks, they must have {MIN_CHUNK_BYTES} bytes on average; send larger chunks, "
        self._last_body.set_exception(RequestPayloadError(f"{message}or a Content-Length"))
        self._close = True  # the rest of the body is dropped

    def _keep(self, data: bytes) -> None:
        """Keep pipelined bytes. If there is no room, close after the current request: clients resend the others."""
        if self._port.ahead_bytes + len(data) > MAX_AHEAD_BYTES:
            self._close = True
            return
        self._port.ahead_bytes += len(data)
        self._ahead += data
        self._pause_reading_for_buffer()

    def _take_ahead(self) -> bytes:
        self._port.ahead_bytes -= len(self._ahead)
        data, self._ahead = self._ahead, b""
        return data

    async def _handle_request(
        self,
        request: web.BaseRequest,
        start_time: float | None,
        request_handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
    ) -> tuple[web.StreamResponse, bool]:
        try:
            return await super()._handle_request(request, start_time, request_handler)
        finally:
            self._go_on()

    def _go_on(self) -> None:
        """Read the next request after an answer was sent. The request may have arrived already."""
        self.silent_since = self._loop.time()
        self._is_answering = bool(self._messages)  # after a declined upgrade, aiohttp has already read further
        if self._messages:
            self._last_body = self._messages[-1][1]
        elif self._close and not self._last_body.is_eof():
            self._last_body._exception = None  # aiohttp drops the rest for a while, so that the client reads its answer
        ahead = self._take_ahead() if self._ahead else b""
        if self.transport is None or self._close or self._force_close or not self._last_body.is_eof():
            return
        if self._buffer_paused:
            self._resume_reading_for_buffer()
        self._read(b"")  # data that arrived with the request
        if ahead:
            self.data_received(ahead)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the last answer of a connection, after an invalid request or a bug in the handler."""
        answer = self.refuse(request, status, exc, message)
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, so no other can be sent")
        answer.force_close()
        return answer

    def refuse(
        self, request: web.BaseRequest, status: int, error: BaseException | None, said: str | None
    ) -> web.StreamResponse:
        """Return the response to an invalid request, or to a bug in the handler (status 500).

        said: the parser's error message, if the request is invalid. The client caused this error, so it is not logged.
        """
        if status >= 500 and not isinstance(error, UnknownCoding):
            return super().handle_error(request, status, error, said)
        return web.Response(
            status=status, text=f"the request is not valid HTTP: {(said or 'malformed').strip()[:200]}\n"
        )

    def _expect_head(self) -> None:
        """Start the time limit for a head that has begun, or that the client has to send now."""
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = self._loop.time() + HEAD_SECONDS
        self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def _refuse(self, error: HttpProcessingError) -> None:
        """Queue a rejection as the last message of this connection. `handle_error` answers it in its turn."""
        self._messages.append((_ErrInfo(error.code, error, error.message), EMPTY_PAYLOAD))
        self._close = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
