"""HTTP ports that anybody may reach. Used by the gateway, the metrics server and the operator.

A new connection is always taken: when all are in use, the client address that has the most connections waiting for
their client loses those that have been silent for longest. Only if none waits for its client is the new one refused.
New connections of different client addresses take turns (`listening`).
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

logger = logging.getLogger(__name__)

_LOG_SECONDS: Final = 10.0


class Server(Port):
    """The connections of one port, each a `connection_class`. `options` are aiohttp's."""

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        max_connections: int,
        connection_class: type[Connection] = Connection,
        **options: Any,
    ) -> None:
        super().__init__(handler, **options)
        self.max_connections = max_connections
        self._connection_class = connection_class
        self._silent_until = 0.0
        self.ahead_bytes = 0
        self.full_answer = connection_class.full_answer

    def __call__(self) -> web.RequestHandler:
        return self._connection_class(self)

    def make_room(self) -> bool:
        """Whether there may be one connection more; ends some that wait for their client if that is needed."""
        if len(self._connections) < self.max_connections:
            return True
        waiting = [each for each in cast(list[Connection], self.connections) if each.waits_for_client]
        self._log(len(waiting))
        if not waiting:
            return False
        (peer, _), *_ = Counter(each.peer for each in waiting).most_common(1)
        of_peer = (each for each in waiting if each.peer == peer)
        # Several at once, so that the search costs each new connection little.
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
    """aiohttp's, with a `Server` of ours."""

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
    """Each address takes turns with the others."""
    return Peer(name_peer(host))


def open_port(runner: web.BaseRunner, host: str, port: int, find_peer: Callable[[str], Peer] = find_peer) -> Acceptor:
    """Listens for a runner that is set up. An empty `host` is every address; port 0 takes any free one.

    As many new connections may wait for their turn as there may be connections.
    """
    server = runner.server
    assert server is not None, "the runner is set up"
    if not isinstance(server, Server):
        return Acceptor(listen(host, port), server, find_peer)
    max_waiting = min(server.max_connections, MAX_WAITING)
    return Acceptor(listen(host, port), server, find_peer, server.full_answer, max_waiting)
