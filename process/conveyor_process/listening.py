"""How every program listens on its ports."""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final

# New connections that the kernel keeps for a process which does not take them at once. It drops the packets of those
# beyond, whose clients try again after a second.
BACKLOG: Final = 2048
MAX_ACCEPTED_A_TURN: Final = 16  # connections of one socket in one turn of the event loop, which has other work too
_PAUSE_SECONDS: Final = 0.1  # in which some descriptors or memory may be free again

logger = logging.getLogger(__name__)


def allow_open_files() -> None:
    """As many as the system lets this process have: many systems begin with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets. An empty `host` is every address, IPv4 and IPv6; port 0 takes any free one. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                listening = socket.socket(family, kind, protocol)
            except OSError:  # a kernel without this family
                continue
            opened.append(listening)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            chosen_port = port or opened[0].getsockname()[1]
            listening.bind((address[0], chosen_port, *address[2:]))
            listening.listen(BACKLOG)
    except OSError:
        for listening in opened:
            listening.close()
        raise
    return opened


class Acceptor:
    """Accepts the connections of `sockets`, and makes a protocol for each. `tls` are asyncio's options for TLS.

    The servers of libuv, and so uvloop's, accept one connection in each turn of the event loop. While turns are slow,
    new clients wait behind those before them. This class accepts all that wait, some in each turn.
    """

    def __init__(
        self, sockets: Sequence[socket.socket], build_protocol: Callable[[], asyncio.BaseProtocol], **tls: Any
    ) -> None:
        self.sockets = sockets
        self._build_protocol = build_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[None]] = set()
        self._is_closed = False
        for listening in sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def port(self) -> int:
        """The real one, also if 0 was asked for."""
        number: int = self.sockets[0].getsockname()[1]
        return number

    def close(self) -> None:
        """Stops listening. Connections that have reached the kernel are accepted first."""
        if self._is_closed:
            return
        self._is_closed = True
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            with suppress(OSError):
                for opened in _take(listening, BACKLOG):
                    self._connect_soon(opened)
            listening.close()

    async def wait_connected(self, within_seconds: float) -> None:
        """Returns when each accepted connection has its protocol: with TLS, after its handshake."""
        if self._connecting:
            await asyncio.wait(set(self._connecting), timeout=within_seconds)

    def _accept(self, listening: socket.socket) -> None:
        try:
            for opened in _take(listening, MAX_ACCEPTED_A_TURN):
                self._connect_soon(opened)
        except OSError as error:
            logger.warning("event=accept_failed consequence=new_clients_wait error=%s", error)
            self._loop.remove_reader(listening)
            self._loop.call_later(_PAUSE_SECONDS, self._go_on, listening)

    def _go_on(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _connect_soon(self, opened: socket.socket) -> None:
        task = self._loop.create_task(self._connect(opened))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, opened: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._build_protocol, opened, **self._tls)
        except (OSError, TimeoutError):  # the client has left, or speaks no TLS
            opened.close()


def _take(listening: socket.socket, most: int) -> Iterator[socket.socket]:
    """Accepted connections. Raises OSError if this process may open no more."""
    for _ in range(most):
        try:
            opened, _address = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EPROTO):  # that client has left
                continue
            raise
        opened.setblocking(False)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield opened


async def close_port(acceptor: Acceptor, within_seconds: float = 1.0) -> None:
    """Every connection that reached the port is its server's then."""
    acceptor.close()
    await acceptor.wait_connected(within_seconds)
