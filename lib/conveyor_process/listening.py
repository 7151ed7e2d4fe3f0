"""Opens the ports of every program and accepts connections fairly."""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from traceback import clear_frames
from typing import Any, Final

from conveyor_process.arrivals import MAX_A_ROUND, Arrivals, Peer

# The number of new connections that the kernel queues until the process accepts them. Beyond it, the kernel drops
# packets, and clients retry after a second.
BACKLOG: Final = 2048
MAX_ACCEPTED_A_TURN: Final = 64  # accepted from one socket in one turn of the event loop, which has other work too
MAX_WAITING: Final = 2048  # accepted connections that wait for their turn
MAX_HANDSHAKES: Final = 128  # concurrent TLS handshakes: each has buffers of 256 KiB before it counts as a connection
_LOG_SECONDS: Final = 10.0
_READ_BYTES: Final = 64 << 10
_IPV4_MAPPED: Final = bytes(10) + b"\xff\xff"
_PAUSE_SECONDS: Final = 0.1  # pause before accepting again after descriptors or memory ran out

logger = logging.getLogger(__name__)


def allow_open_files() -> int:
    """Raise the limit of open files to the hard limit, and return it. Many systems start processes with 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return most


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets.

    `host`: "" for all IPv4 and IPv6 addresses. `port`: 0 for a free one. Raises OSError.
    """
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


EVERYBODY: Final = Peer("", MAX_A_ROUND)


class Acceptor:
    """Accepts the connections of `sockets`, and builds a protocol for each. `tls`: asyncio's options for TLS.

    libuv's servers, which uvloop uses, accept one connection in each turn of the event loop. If turns are slow, new
    clients wait for all earlier ones. This class accepts all waiting connections. Their peers, which `find_peer` finds
    by host, take turns. In each turn of the event loop, the next peers get protocols for `count_a_turn` connections
    each, at most MAX_A_ROUND in all. If too many connections wait, the peer that needs most turns loses its newest
    ones, which get `refusal` and no protocol.

    If too many TLS handshakes are open, the oldest are closed, because a handshake normally takes some milliseconds.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        build_protocol: Callable[[], asyncio.BaseProtocol],
        find_peer: Callable[[str], Peer] = lambda _: EVERYBODY,
        refusal: bytes = b"",
        max_waiting: int = MAX_WAITING,
        **tls: Any,
    ) -> None:
        self.sockets = sockets
        self._build_protocol = build_protocol
        self._find_peer = find_peer
        self._arrivals = Arrivals[socket.socket](max_waiting)
        self._refusal = refusal
        self._max_waiting = max_waiting
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[asyncio.Task[None], socket.socket] = {}  # oldest first
        self._is_closed = False
        self._has_next_round = False
        self._silent_until = 0.0
        for listening in sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    @property
    def port(self) -> int:
        """The actual port, also if port 0 was requested."""
        number: int = self.sockets[0].getsockname()[1]
        return number

    def close(self) -> None:
        """Stop listening, after accepting the connections that have reached the kernel."""
        if self._is_closed:
            return
        self._is_closed = True
        for listening in self.sockets:
            self._loop.remove_reader(listening)
            with suppress(OSError):
                self._take_from(listening, BACKLOG)
            listening.close()
        while self._arrivals:
            self._connect_round()

    async def wait_connected(self, within_seconds: float) -> None:
        """Wait up to `within_seconds` until each accepted connection has its protocol (after a TLS handshake)."""
        if self._connecting:
            await asyncio.wait(list(self._connecting), timeout=within_seconds)

    def _accept(self, listening: socket.socket) -> None:
        try:
            self._take_from(listening, MAX_ACCEPTED_A_TURN)
        except OSError as error:
            logger.warning("event=accept_failed consequence=new_clients_wait error=%s", error)
            self._loop.remove_reader(listening)
            self._loop.call_later(_PAUSE_SECONDS, self._go_on, listening)
        if not self._has_next_round:
            self._start_round()

    def _go_on(self, listening: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listening, self._accept, listening)

    def _take_from(self, listening: socket.socket, most: int) -> None:
        """Accept up to `most` connections into the queue. Raises OSError if the process may not open more files."""
        for opened, host in _take(listening, most):
            refused = self._arrivals.add(self._find_peer(host), opened)
            if refused is not None:
                self._refuse(refused)

    def _start_round(self) -> None:
        self._connect_round()
        self._has_next_round = bool(self._arrivals)
        if self._has_next_round:
            self._loop.call_soon(self._start_round)

    def _connect_round(self) -> None:
        for opened in self._arrivals.take_round():
            if self._tls and len(self._connecting) >= MAX_HANDSHAKES:
                oldest = self._connecting.pop(next(iter(self._connecting)))
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its handshake fails, as if the client had left
            task = self._loop.create_task(self._connect(opened))
            self._connecting[task] = opened
            task.add_done_callback(lambda done: self._connecting.pop(done, None))

    async def _connect(self, opened: socket.socket) -> None:
        try:
            opened.setblocking(False)
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._build_protocol, opened, **self._tls)
        except (OSError, TimeoutError) as error:  # the client has left, or speaks no TLS
            opened.close()
            clear_frames(error.__traceback__)  # breaks a reference cycle that would keep the TLS buffers

    def _refuse(self, opened: socket.socket) -> None:
        if (now := self._loop.time()) >= self._silent_until:
            self._silent_until = now + _LOG_SECONDS
            logger.warning(
                "event=new_connections_full waiting=%d consequence=the_largest_peers_are_refused", self._max_waiting
            )
        opened.setblocking(False)
        with suppress(OSError):
            opened.recv(_READ_BYTES)  # with unread data, the kernel would reset the connection
        with suppress(OSError):
            opened.send(self._refusal)
        opened.close()


def name_peer(host: str) -> str:
    """Return the name of a peer: its IPv4 address, or its IPv6 network (/64), which usually belongs to one machine."""
    if ":" not in host:
        return host
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    if packed.startswith(_IPV4_MAPPED):
        return socket.inet_ntop(socket.AF_INET, packed[len(_IPV4_MAPPED) :])
    return socket.inet_ntop(socket.AF_INET6, packed[:8] + bytes(8)) + "/64"


def _take(listening: socket.socket, most: int) -> Iterator[tuple[socket.socket, str]]:
    """Yield accepted connections with their peers' addresses. Raises OSError if the process may not open more files."""
    for _ in range(most):
        try:
            opened, address = listening.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EPROTO):  # that client has left
                continue
            raise
        yield opened, address[0]


async def close_port(acceptor: Acceptor, within_seconds: float = 1.0) -> None:
    """Stop listening, after accepting the connections that have reached the kernel.

    Wait up to `within_seconds` until the server has these connections.
    """
    acceptor.close()
    await acceptor.wait_connected(within_seconds)
