"""HTTP ports that anybody can reach. Used by the gateway, the metrics server and the operator.

If the limit of connections is reached, a new connection replaces others that wait for their client. Of the owner with
most such connections (for whom the last request was), the client address with most of them loses those that have been
silent longest. If no connection waits for its client, the new one is refused. New connections from different client
addresses take turns (`listening`).
"""

import heapq
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, cast

from aiohttp import web

from conveyor_http.connection import Connection, Port
from conveyor_process.arrivals import Peer
from conveyor_process.listening import MAX_WAITING, Acceptor, listen, name_peer
from conveyor_process.serving_certificate import ServingCertificate

logger = logging.getLogger(__name__)

_LOG_SECONDS: Final = 10.0


class Server(Port):
    """The connections of one port. Each is a `connection_class`. `options` are passed to aiohttp's server."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        max_connections: int,
        connection_class: type[Connection] = Connection,
        keep_alive_seconds: float = 75.0,
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        self.keep_alive_seconds = keep_alive_seconds
        self.max_connections = max_connections
        self._connection_class = connection_class
        self._silent_until = 0.0
        self.ahead_bytes = 0
        self.full_answer = connection_class.full_answer

    def __call__(self) -> web.RequestHandler:
        return self._connection_class(self)

    def make_room(self) -> bool:
        """Return whether there may be one more connection. If needed, close connections that wait for their client."""
        if len(self._connections) < self.max_connections:
            return True
        waiting = [each for each in cast(list[Connection], self.connections) if each.waits_for_client]
        self._log(len(waiting))
        if not waiting:
            return False
        (owner, _), *_ = Counter(each.owner for each in waiting).most_common(1)
        of_owner = [each for each in waiting if each.owner == owner]
        (peer, _), *_ = Counter(each.peer for each in of_owner).most_common(1)
        of_peer = (each for each in of_owner if each.peer == peer)
        # Closes several at once, so that the search costs little for each new connection.
        for each in heapq.nsmallest(1 + self.max_connections // 64, of_peer, key=lambda each: each.silent_since):
            each.drop()
            self._connections.pop(each, None)
        return True

    def _log(self, num_waiting: int) -> None:
        if (now := self._loop.time()) >= self._silent_until:
            self._silent_until = now + _LOG_SECONDS
            what = "silent_ones_are_closed" if num_waiting else "new_ones_are_refused"
            logger.warning("event=connections_full open=%d consequence=%s", self.max_connections, what)


class AppRunner(web.AppRunner):
    """aiohttp's AppRunner with a `Server`, which limits connections."""

    def __init__(
        self,
        app: web.Application,
        max_connections: int,
        connection_class: type[Connection] = Connection,
        **options: Any,
    ) -> None:
        super().__init__(app, access_log=None, **options)
        self._max_connections = max_connections
        self._connection_class = connection_class

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return Server(
            made.request_handler, self._max_connections, self._connection_class, request_factory=made.request_factory
        )


def find_peer(host: str) -> Peer:
    """Return the peer that takes turns (`listening`): one for each IPv4 address or IPv6 network."""
    return Peer(name_peer(host))


def open_port(
    runner: web.BaseRunner,
    host: str,
    port: int,
    find_peer: Callable[[str], Peer] = find_peer,
    certificate: ServingCertificate | None = None,
) -> Acceptor:
    """Listen for a runner that is set up. An empty `host` means all addresses; port 0 means any free port.

    With a certificate, the port serves TLS.

    As many new connections may wait for their turn as the port may have connections, but at most MAX_WAITING.
    """
    server = runner.server
    assert server is not None, "the runner is set up"
    if not isinstance(server, Server):
        return Acceptor(listen(host, port), server, find_peer)
    max_waiting = min(server.max_connections, MAX_WAITING)
    if certificate is None:
        return Acceptor(listen(host, port), server, find_peer, server.full_answer, max_waiting)
    return Acceptor(listen(host, port), server, find_peer, max_waiting=max_waiting, **certificate.options)
