"""The HTTPS port: opened with the first certificate, and served by a new server after every change of certificates.

First, the new server takes over the listening socket. Then the old server answers its open requests and closes its
connections. So no caller is rejected, and no connection outlives the authority that verified it. Called by `server`.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from conveyor_http.connection import Connection
from conveyor_http.server import AppRunner, find_peer
from conveyor_metrics.app import refuse_outside
from conveyor_metrics.auth import Trust
from conveyor_metrics.certificates import Serving
from conveyor_process.listening import BACKLOG, Acceptor, close_port

logger = logging.getLogger(__name__)

# How long open requests may take at a shutdown. To answer one, the server reads the gateways, which
# takes at most `gateway_timeout_seconds`: 1 s by default.
_SHUTDOWN_SECONDS = 5.0
# How long the last accepted connections may take for their handshake.
_ACCEPTED_SECONDS = 0.1
# How long a TLS handshake may take. A connection counts toward `_MAX_CONNECTIONS` only after its handshake, so slow
# handshakes must end early. asyncio's default is a minute.
_HANDSHAKE_SECONDS = 5.0
_MAX_CONNECTIONS = 256  # the callers are API servers


class ApiConnection(Connection):
    """A connection that answers malformed requests and internal errors with a Kubernetes Status object."""

    __slots__ = ()

    def refuse(
        self, request: web.BaseRequest, status: int, error: BaseException | None, said: str | None
    ) -> web.StreamResponse:
        if status >= 500:
            logger.error("event=internal_error method=%s path=%s", request.method, request.path, exc_info=error)
        return refuse_outside(status, said)


@dataclass(frozen=True, slots=True)
class _Port:
    """The listening socket with one TLS context, and the server of its connections."""

    acceptor: Acceptor
    runner: AppRunner

    async def close(self) -> None:
        """Close the port. Returns after every accepted request was answered."""
        await close_port(self.acceptor, _ACCEPTED_SECONDS)
        await self.runner.cleanup()


class Listener:
    """The HTTPS port. `port` is None until it is open."""

    def __init__(self, host: str, port: int, build_app: Callable[[Trust], web.Application]) -> None:
        """host: "" for all addresses. port: 0 for any free port."""
        self.port: int | None = None
        self._wanted = host, port
        self._build_app = build_app

    async def serve(self, servings: AsyncIterator[Serving]) -> None:
        """Serve until cancelled. Returns after every accepted request was answered."""
        port: _Port | None = None
        listening: socket.socket | None = None
        retiring: asyncio.Task[None] | None = None
        try:
            async for serving in servings:
                listening = listening or _bind(*self._wanted)
                retired, port = port, await self._start(listening, serving)
                if retired is not None:
                    retiring = asyncio.create_task(retired.close())
                    await asyncio.shield(retiring)
        finally:
            if listening is not None:
                listening.close()
            try:
                if retiring is not None:
                    await retiring
            finally:
                if port is not None:
                    await port.close()

    async def _start(self, listening: socket.socket, serving: Serving) -> _Port:
        app = self._build_app(serving.trust)
        runner = AppRunner(app, _MAX_CONNECTIONS, ApiConnection, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        assert runner.server is not None, "the runner is set up"
        tls: dict[str, Any] = {"ssl": serving.context, "ssl_handshake_timeout": _HANDSHAKE_SECONDS}
        acceptor = Acceptor([listening.dup()], runner.server, find_peer, **tls)
        if self.port is None:
            self.port = listening.getsockname()[1]
            logger.info("event=serving https_port=%d", self.port)
        return _Port(acceptor, runner)


def _bind(host: str, port: int) -> socket.socket:
    if host or not socket.has_dualstack_ipv6():
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=BACKLOG)
