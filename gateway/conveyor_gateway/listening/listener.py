"""Opens the gateway's ports, with one handler and a limit on connections for each port.

Used by `server`. A listener responds to invalid HTTP with errors in OpenAI's format, passes bodies to the handler
unchanged, and cancels the handler when the client leaves. It does not know what the handlers serve.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import RawRequestMessage
from aiohttp.http_exceptions import LineTooLong

from conveyor_gateway.errors import Code, GatewayError
from conveyor_gateway.listening.cors import NOBODY, Cors
from conveyor_gateway.responses import build_error, find_request_id
from conveyor_http.connection import MAX_HEAD_BYTES, MAX_LINE_BYTES, Connection
from conveyor_http.framing import UnknownCoding
from conveyor_http.server import Server, find_peer, open_port
from conveyor_process.arrivals import Peer
from conveyor_process.listening import close_port
from conveyor_process.serving_certificate import ServingCertificate

logger = logging.getLogger(__name__)

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


# Some answers contain data from tenants. With these headers, a browser does not show or execute an answer.
SAFE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; sandbox",
    "X-Content-Type-Options": "nosniff",
}


def _build_full() -> bytes:
    """Return the bytes that are sent to a connection above the limit. Its request is not read."""
    error = GatewayError("the gateway is at its limit of connections; retry later", Code.TOO_MANY_CONNECTIONS)
    body = json.dumps(error.to_json()).encode()
    lines = ["HTTP/1.1 503 Service Unavailable", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (error.headers | SAFE_HEADERS).items()]
    return "\r\n".join((*lines, "Connection: close", "", "")).encode() + body


def _request_factory(cors: Cors) -> Callable[..., web.BaseRequest]:
    class Request(web.BaseRequest):
        """aiohttp's request. Every response to it gets `SAFE_HEADERS` and the CORS headers."""

        async def _prepare_hook(self, response: web.StreamResponse) -> None:
            response.headers.update(SAFE_HEADERS)
            response.headers.update(cors.build_headers(self))

    def make(
        message: RawRequestMessage,
        payload: StreamReader,
        protocol: web.RequestHandler,
        writer: AbstractStreamWriter,
        task: asyncio.Task[None],
    ) -> web.BaseRequest:
        return Request(message, payload, protocol, writer, task, asyncio.get_running_loop())

    return make


class _Connection(Connection):
    """A connection that answers malformed requests with this gateway's own errors."""

    __slots__ = ()

    full_answer = _build_full()

    def refuse(
        self, request: web.BaseRequest, status: int, error: BaseException | None, said: str | None
    ) -> web.StreamResponse:
        if isinstance(error, LineTooLong):
            refusal: GatewayError = GatewayError(
                f"the request line and each header may have {MAX_LINE_BYTES} bytes, and all together {MAX_HEAD_BYTES}",
                Code.HEADERS_TOO_LARGE,
            )
        elif isinstance(error, UnknownCoding):
            refusal = GatewayError(error.message, Code.UNKNOWN_TRANSFER_CODING)
        elif status < 500:
            refusal = GatewayError(
                f"the request is not valid HTTP: {(said or 'malformed').strip()[:200]}", Code.MALFORMED_HTTP
            )
        else:
            logger.error("event=internal_error path=%s", request.path, exc_info=error)
            refusal = GatewayError("internal error in the gateway; its log has the request's id", Code.INTERNAL_ERROR)
        return build_error(refusal, find_request_id(request), request.rel_url.raw_path)


class Listener:
    """One port. Once it is open, `port` is the actual port, even if 0 was requested."""

    def __init__(
        self,
        handler: Handler,
        host: str,
        port: int,
        max_connections: int,
        cors: Cors = NOBODY,
        find_peer: Callable[[str], Peer] = find_peer,
        keep_alive_seconds: float = 75.0,
        certificate: ServingCertificate | None = None,
    ) -> None:
        """certificate: with it, the port serves TLS."""
        self._certificate = certificate
        self._handler = handler
        self._find_peer = find_peer
        self._cors = cors
        self._max_connections = max_connections
        self._keep_alive_seconds = keep_alive_seconds
        self._host = host
        self._requested_port = port
        self.port = port

    async def open(self) -> None:
        server = Server(
            self._handler,
            self._max_connections,
            _Connection,
            self._keep_alive_seconds,
            handler_cancellation=True,
            request_factory=_request_factory(self._cors),
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=1.0)
        await self._runner.setup()
        where = (self._host, self._requested_port)
        self._accepting = open_port(self._runner, *where, self._find_peer, self._certificate)
        self.port = self._accepting.port

    async def stop_accepting(self) -> None:
        """Close the port. Open connections stay, because they may be in the middle of a request."""
        await close_port(self._accepting)

    async def close(self) -> None:
        await self.stop_accepting()
        await self._runner.cleanup()
