"""Starts the fork server and the walker, exchanges messages with them, and replaces them when they end.

Used by `client`, which knows what the messages mean. A thread waits for the processes, so the engine's loop never does.
"""

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from conveyor_engine.masks import limits
from conveyor_engine.masks.board import Board
from conveyor_engine.wire.frames import FrameReader

_PROGRAM: Final = "conveyor_engine.masks.process"
_TICK_SECONDS: Final = 0.25
_RESTART_SECONDS: Final = 0.5  # between two starts of the fork server
_READ_BYTES: Final = 2**20
# The C library keeps freed memory: the next grammar would otherwise pay for new pages.
_KEEPS_MEMORY: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
_log = logging.getLogger(__name__)


class Owner(Protocol):
    """Whoever the messages are for. The supervisor's thread calls it with the lock."""

    def handle_server(self, payload: bytes) -> None:
        """Handle a message of the fork server."""
        ...

    def handle_walker(self, payload: bytes) -> None:
        """Handle a message of the walker."""
        ...

    def resend_to_server(self) -> None:
        """Send a new fork server what it must know."""
        ...

    def resend_to_walker(self) -> None:
        """Send a new walker what it must know."""
        ...

    def end_work(self, tickets: set[int]) -> None:
        """Handle the end of a walker that was working on these tickets."""
        ...

    def end_server(self) -> bool:
        """Handle the end of the fork server. Returns whether another one may start."""
        ...


class _Outbox:
    """Bytes for a socket. `send` never waits; the thread sends the rest."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.unsent = bytearray()

    def put(self, data: bytes) -> None:
        self.unsent += data
        self.send()

    def send(self) -> None:
        with contextlib.suppress(OSError):  # the socket is full, or its end is noticed when it is read
            while self.unsent:
                del self.unsent[: self.connection.send(self.unsent, socket.MSG_DONTWAIT)]


class Supervisor:
    """The processes, and the thread that waits for them. `start` and the `send` methods are called with the lock."""

    def __init__(
        self, owner: Owner, board: Board, arguments: Sequence[str], lock: AbstractContextManager[bool]
    ) -> None:
        """arguments: of the fork server, in addition to its sockets and the board."""
        self._owner, self._board, self._lock = owner, board, lock
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None  # the fork server
        self._server: _Outbox | None = None
        self._walkers: socket.socket | None = None
        self._walker: _Outbox | None = None
        self._thread: threading.Thread | None = None
        self._poke_reader, self._poke_writer = os.pipe()
        for end in (self._poke_reader, self._poke_writer):
            os.set_blocking(end, False)
        self._watched: dict[int, float] = {}  # since when a lane works on a ticket

    # --- called by the owner ---

    def start(self) -> None:
        """Start the processes, unless they have been started. The thread does it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()

    @property
    def has_walker(self) -> bool:
        """Whether messages for the walker can be sent. A new walker gets them from `resend_to_walker`."""
        return self._walker is not None

    def send_to_server(self, data: bytes) -> None:
        """Send the message, if there is a fork server."""
        self._send(self._server, data)

    def send_to_walker(self, data: bytes) -> None:
        """Send the messages to the walker."""
        self._send(self._walker, data)

    def _send(self, box: _Outbox | None, data: bytes) -> None:
        if box is None:
            return
        box.put(data)
        if box.unsent:  # the thread sends the rest
            with contextlib.suppress(BlockingIOError):
                os.write(self._poke_writer, b"\0")

    # --- the thread ---

    def _run(self) -> None:
        while True:
            self._start_server()
            self._read_until_end()
            if not self._end_processes():
                return
            time.sleep(_RESTART_SECONDS)

    def _start_server(self) -> None:
        """Start the fork server and a walker."""
        server, their_server = socket.socketpair()
        walkers, their_walkers = socket.socketpair()
        inherited = [their_server.fileno(), their_walkers.fileno(), self._board.fd]
        names = ("--messages", "--walkers", "--board")
        flags = [text for name, fd in zip(names, inherited, strict=True) for text in (name, str(fd))]
        with their_server, their_walkers:
            process = subprocess.Popen(
                [sys.executable, "-m", _PROGRAM, *flags, *self._arguments],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **_KEEPS_MEMORY},
            )
        _log.info("event=grammar_process_started pid=%d", process.pid)
        with self._lock:
            self.process, self._server, self._walkers = process, _Outbox(server), walkers
            self._start_walker()
            self._owner.resend_to_server()

    def _start_walker(self) -> None:
        assert self._walkers is not None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._walkers, [b"w"], [theirs.fileno()])
        for lane in range(len(self._board.list_work())):
            self._board.begin_work(lane, 0)
        self._watched.clear()
        self._walker = _Outbox(ours)
        self._owner.resend_to_walker()

    def _read_until_end(self) -> None:
        """Handle messages until the fork server ends. Replace each walker that ends."""
        server, walker, poke = self._server, self._walker, self._poke_reader
        assert server is not None
        assert walker is not None
        frames = {server: FrameReader(), walker: FrameReader()}
        while True:
            full = [box.connection for box in (server, walker) if box.unsent]
            watched: list[socket.socket | int] = [server.connection, walker.connection, poke]
            readable, _, _ = select.select(watched, full, [], _TICK_SECONDS)
            if poke in readable:
                os.read(poke, 1024)
            with self._lock:
                server.send()
                walker.send()
            if server.connection in readable and not self._receive(server, frames[server], self._owner.handle_server):
                return
            if walker.connection in readable and not self._receive(walker, frames[walker], self._owner.handle_walker):
                self._replace_walker()
                walker = self._walker
                assert walker is not None
                frames[walker] = FrameReader()
            self._watch()

    def _receive(self, box: _Outbox, frames: FrameReader, handle: Callable[[bytes], None]) -> bool:
        """Handle what has arrived. Returns False if the other end is closed."""
        try:
            data = box.connection.recv(_READ_BYTES)
        except OSError:
            return False
        with self._lock:
            for payload in frames.feed(data):
                handle(payload)
        return bool(data)

    def _replace_walker(self) -> None:
        assert self._walker is not None
        _log.warning("event=grammar_walker_ended")
        self._walker.connection.close()
        with self._lock:
            self._end_work()
            self._start_walker()

    def _end_processes(self) -> bool:
        """Handle the end of the fork server, and with it of the walker. Returns whether new ones may start."""
        assert self.process is not None
        assert self._server is not None
        assert self._walkers is not None
        assert self._walker is not None
        with self._lock:
            self._end_work()
            for each in (self._server.connection, self._walkers, self._walker.connection):
                each.close()
            self._server = self._walkers = self._walker = None
            may_start = self._owner.end_server()
        self.process.kill()
        _log.warning("event=grammar_process_ended code=%d", self.process.wait())
        return may_start

    def _end_work(self) -> None:
        self._owner.end_work(set(self._board.list_work()) - {0})

    def _watch(self) -> None:
        """Give up a walker that takes too long for one mask. The fork server kills it when the next one starts."""
        now = time.monotonic()
        self._watched = {ticket: self._watched.get(ticket, now) for ticket in self._board.list_work() if ticket}
        if any(now - since > limits.STUCK_SECONDS for since in self._watched.values()):
            assert self._walker is not None
            self._walker.connection.shutdown(socket.SHUT_RDWR)  # its end is noticed next
