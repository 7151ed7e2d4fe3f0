"""One client's connection: uvicorn's, with limits for headers and for how long answers lie unread. Used by `server`."""

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from conveyor_engine.api.failures import error_body

HEAD_BYTES_MAX = 64 * 2**10  # request line and headers; the trailers after a body too
UNREAD_SECONDS_MAX = 120.0  # a client that takes no byte of its answer for so long is gone


class Connection(HttpToolsProtocol):
    """What is too long, or no HTTP, is answered in OpenAI's form, and the connection ends."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._num_bytes = 0  # since the last piece of a body, or the end of a request
        self._too_long = False
        self._unread_timer: asyncio.TimerHandle | None = None
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)
        self._expect_head()
        if self._num_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._too_long = True
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._too_long = len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > HEAD_BYTES_MAX
        if self._too_long:
            raise ValueError  # stops the parser; uvicorn then calls send_400_response
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        status, code = HTTPStatus.BAD_REQUEST, "malformed_http"
        if self._too_long:
            status, code = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "headers_too_large"
            msg = f"request line and headers may have {HEAD_BYTES_MAX} bytes together"
        body = error_body(msg, "invalid_request_error", code)
        head = f"HTTP/1.1 {status:d} {status.phrase}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def pause_writing(self) -> None:
        """Much lies unread."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget_unread()
        self._forget_head()

    def _expect_head(self) -> None:
        """Ends a connection that brings no whole head in time; uvicorn ends only one that brings nothing at all."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reading(self, num_unread_before: int | None = None) -> None:
        """Ends the connection if nothing was read since the last look. Without it answers would pile up here."""
        num_unread = self.transport.get_write_buffer_size()
        if num_unread == num_unread_before:
            self.transport.abort()
        else:
            self._unread_timer = self.loop.call_later(UNREAD_SECONDS_MAX, self._expect_reading, num_unread)

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
