"""HTTP servers on aiohttp's low level: one handler per port, answers in OpenAI's form also to what is no HTTP.

Made by `server`. Bounds the connections and the headers of each, in bytes and in time, hands bodies over as they were
sent, and cancels the handler of a client that goes away. Knows nothing of what is served.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import StreamReader, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo

from conveyor_gateway.answers import build_error, find_request_id
from conveyor_gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest, Unavailable

logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

MAX_LINE_BYTES: Final = 8 << 10  # the request line, and each header
MAX_HEADERS: Final = 128
MAX_HEAD_BYTES: Final = 32 << 10  # all of them
HEAD_SECONDS: Final = 10.0  # how long they may take to arrive
_MAX_PIPELINED: Final = 2  # requests that are read ahead on one connection
_LOG_SECONDS: Final = 10.0
_OPTIONS: Final[dict[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,  # between two requests
    "lingering_time": 1.0,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
    "max_line_size": MAX_LINE_BYTES,
    "read_bufsize": 64 << 10,
    "tcp_keepalive": True,
}


class _InternalError(GatewayError):
    status = 500
    type = "server_error"


class _Connection(web.RequestHandler):
    """aiohttp's connection with bounds on what comes before a body, and our words for what never reaches the handler.

    A head is a request line and its headers. aiohttp bounds each line and their number; it would keep 1 MiB of them.
    """

    __slots__ = ("_head_bytes", "_last_body")

    def __init__(self, server: "_Server") -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **_OPTIONS)
        self._max_msg_queue_size = _MAX_PIPELINED
        self._msg_queue_resume_size = _MAX_PIPELINED - 1
        self._head_bytes = 0  # of the head that is on its way
        self._last_body: StreamReader = EMPTY_PAYLOAD  # of the last request that was read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(self._manager, _Server)
        if self._manager.is_full():
            refused = cast(asyncio.Transport, transport)
            refused.write(_FULL)
            refused.close()
            return
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Lets aiohttp read a head only as far as it may go."""
        if self._close:
            return
        while self._last_body.is_eof() and len(data) > (room := MAX_HEAD_BYTES - self._head_bytes):
            self._read(data[:room])
            if self._head_bytes == MAX_HEAD_BYTES:
                self._refuse_head()
                return
            data = data[room:]
        self._read(data)

    def _read(self, data: bytes) -> None:
        is_head, known = self._last_body.is_eof(), self._request_count
        super().data_received(data)
        if self._request_count > known:
            self._head_bytes, self._last_body = 0, self._messages[-1][1]
        elif is_head and data:
            if not self._head_bytes:
                self._expect_head()
            self._head_bytes += len(data)

    def _expect_head(self) -> None:
        """A head that begins, or should, must be there in time. aiohttp checks it only while it waits for one."""
        if self._keepalive_handle is not None:
            self._keepalive_handle.cancel()
        self._next_keepalive_close_time = self._loop.time() + HEAD_SECONDS
        self._keepalive_handle = self._loop.call_at(self._next_keepalive_close_time, self._process_keepalive)

    def _refuse_head(self) -> None:
        """The last message of this connection; answered in its turn, by `handle_error`."""
        error = LineTooLong("", MAX_HEAD_BYTES)
        self._messages.append((_ErrInfo(error.code, error, error.message), EMPTY_PAYLOAD))
        self._close = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            error: GatewayError = HeadersTooLarge(
                f"the request line and each header may have {MAX_LINE_BYTES} bytes, together {MAX_HEAD_BYTES}",
                "headers_too_large",
            )
        elif status < 500:
            error = InvalidRequest(
                f"this is no HTTP request: {(message or 'malformed').strip()[:200]}", "malformed_http"
            )
        else:
            logger.error("request path=%s failed by a bug of the gateway", request.path, exc_info=exc)
            error = _InternalError("the gateway failed; the request's id is in its log", "internal_error")
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun, no other can follow")
        answer = build_error(error, find_request_id(request))
        answer.force_close()
        return answer


def _build_full() -> bytes:
    """The whole answer to one connection too many, which is not even read."""
    error = Unavailable("the gateway has as many connections as it may; try again later", "too_many_connections")
    body = json.dumps(error.to_json()).encode()
    lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in error.headers.items()]
    return "\r\n".join((*lines, "Connection: close", "", "")).encode() + body


_FULL: Final = _build_full()


class _Server(web.Server):
    def __init__(self, handler: Handler, max_connections: int) -> None:
        super().__init__(handler, handler_cancellation=True, **_OPTIONS)
        self._max_connections = max_connections
        self._silent_until = 0.0

    def __call__(self) -> web.RequestHandler:
        return _Connection(self)

    def is_full(self) -> bool:
        if len(self._connections) < self._max_connections:
            return False
        if (now := asyncio.get_running_loop().time()) >= self._silent_until:
            self._silent_until = now + _LOG_SECONDS
            logger.warning("connections are refused: %d are open", self._max_connections)
        return True


class Listener:
    """One port. `port` is the real one once it is open, also if 0 was asked for."""

    def __init__(self, handler: Handler, host: str, port: int, max_connections: int) -> None:
        self._handler = handler
        self._max_connections = max_connections
        self._host = host
        self._asked_port = port
        self.port = port

    async def open(self) -> None:
        self._runner = web.ServerRunner(_Server(self._handler, self._max_connections), shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._host or None, self._asked_port, backlog=1024)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def stop_accepting(self) -> None:
        """Closes the port. Open connections go on: one may be in the middle of a request."""
        await self._site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()
