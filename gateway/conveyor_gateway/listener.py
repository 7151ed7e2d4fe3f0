"""HTTP servers on aiohttp's low level: one handler per port, answers in OpenAI's form also to what is no HTTP.

Made by `server`. Sets the limits of request lines and headers, hands bodies over as they were sent, and cancels the
handler of a client that goes away. Knows nothing of what is served.
"""

import asyncio
import logging
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from conveyor_gateway.answers import build_error, find_request_id
from conveyor_gateway.app import Handler
from conveyor_gateway.errors import GatewayError, HeadersTooLarge, InvalidRequest

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 16 << 10  # the request line, and each header
MAX_HEADERS: Final = 128
_OPTIONS: Final[dict[str, Any]] = {
    "access_log": None,
    "auto_decompress": False,
    "keepalive_timeout": 75.0,
    "lingering_time": 1.0,
    "max_field_size": MAX_LINE_BYTES,
    "max_headers": MAX_HEADERS,
    "max_line_size": MAX_LINE_BYTES,
    "tcp_keepalive": True,
}


class _InternalError(GatewayError):
    status = 500
    type = "server_error"


class _Connection(web.RequestHandler):
    """aiohttp's connection with our words for requests that never reach the handler, and for bugs in it."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, LineTooLong):
            error: GatewayError = HeadersTooLarge(
                f"the request line and each header may have {MAX_LINE_BYTES} bytes", "headers_too_large"
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


class _Server(web.Server):
    def __init__(self, handler: Handler) -> None:
        super().__init__(handler, handler_cancellation=True, **_OPTIONS)

    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **_OPTIONS)


class Listener:
    """One port. `port` is the real one once it is open, also if 0 was asked for."""

    def __init__(self, handler: Handler, host: str, port: int) -> None:
        self._handler = handler
        self._host = host
        self._asked_port = port
        self.port = port

    async def open(self) -> None:
        self._runner = web.ServerRunner(_Server(self._handler), shutdown_timeout=1.0)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self._host or None, self._asked_port, backlog=1024)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def stop_accepting(self) -> None:
        """Closes the port. Open connections go on: one may be in the middle of a request."""
        await self._site.stop()

    async def close(self) -> None:
        await self._runner.cleanup()
