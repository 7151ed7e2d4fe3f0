"""The engine process's side of the processes for grammars. Nothing here waits for them, except `wait`, briefly.

A thread reads what they send, and replaces them when they end. An answer whose mask the walker was building when it
ended has cost it its life, so the answer ends with an error. All other answers are opened again, with their tokens.
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
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Final, NamedTuple

from conveyor_engine.masks import limits
from conveyor_engine.masks.board import Board
from conveyor_engine.masks.messages import (
    Accept,
    Broke,
    Cancel,
    Close,
    Compile,
    Compiled,
    Loaded,
    Open,
    Started,
    Try,
    encode,
    from_server_decoder,
    from_walker_decoder,
)
from conveyor_engine.scheduling.request_state import Constraint
from conveyor_engine.wire.frames import FrameReader

_PROGRAM: Final = "conveyor_engine.masks.process"
_VERDICTS_MAX: Final = 1024
_TICK_SECONDS: Final = 0.25
_STARTS_MAX: Final = 4  # of a grammar's trial and compilation together
_RESTART_SECONDS: Final = 0.5  # between two starts of the fork server
_POLL_SECONDS: Final = 0.00005
_READ_BYTES: Final = 2**20
# The C library keeps freed memory: the next grammar would otherwise pay for new pages.
_KEEPS_MEMORY: Final = {"MALLOC_TRIM_THRESHOLD_": str(2**28), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
_log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Whether a grammar may be followed. `problem` is empty if it may."""

    problem: str
    is_too_costly: bool = False


class _Order:
    """A grammar that is tried or compiled."""

    def __init__(self, number: int, grammar: str) -> None:
        self.number = number
        self.grammar = grammar
        self.num_bytes = 0
        self.is_tried = False
        self.num_starts = 0


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


class Masks:
    """Compiles grammars and builds masks. All methods are called by the engine's loop; `on_news` by another thread."""

    def __init__(
        self,
        tokenizer: Path,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        num_rows: int,
        on_news: Callable[[], None],
    ) -> None:
        """tokenizer: its file. on_news: called when a grammar is compiled, or a mask is ready while the loop sleeps."""
        self._board = Board.create(num_rows, -(-vocab_size // 8))
        self._arguments = ["--slots", str(num_rows), "--tokenizer", str(tokenizer), "--vocab-size", str(vocab_size)]
        self._arguments += ["--ends", *map(str, eos_token_ids)]
        self._on_news = on_news
        self._lock = threading.RLock()
        self._tickets = 0
        self._free_slots = list(range(num_rows - 1, -1, -1))
        self._answers: dict[int, Answer] = {}  # by slot
        self._pending: list[Open | Accept | Close | Compile] = []  # not sent yet
        self._orders: dict[int, _Order] = {}
        self._by_grammar: dict[bytes, _Order] = {}
        self._verdicts: OrderedDict[bytes, Verdict] = OrderedDict()
        self._problem = ""  # why no grammar can be followed
        self._process: subprocess.Popen[bytes] | None = None
        self._server: _Outbox | None = None
        self._walkers: socket.socket | None = None
        self._walker: _Outbox | None = None
        self._thread: threading.Thread | None = None
        self._poke_reader, self._poke_writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[int, float] = {}  # since when a lane works on a ticket
        self.walker_pid = 0  # of the walker that started last
        self._last_fatal = ""  # the grammar of the last answer that ended a walker

    # --- called by the loop ---

    def judge(self, key: bytes, grammar: str) -> Verdict | None:
        """Return the verdict; None if the grammar has to be tried first. `on_news` is called when there is one.

        key: from `key_of`.
        """
        with self._lock:
            if self._problem:
                return Verdict(self._problem)
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            if key not in self._by_grammar:
                order = _Order(self._next_ticket(), grammar)
                self._by_grammar[key] = self._orders[order.number] = order
                self._begin(order)
        return None

    def cancel(self, key: bytes) -> None:
        """Stop trying this grammar, because nobody waits for it any more."""
        with self._lock:
            order = self._by_grammar.get(key)
            if order is None or order.is_tried:
                return
            del self._by_grammar[key], self._orders[order.number]
            if self._server is not None:
                self._server.put(encode(Cancel(order.number)))
                self._poke()

    def follow(self, grammar: str) -> "Answer":
        """Return an answer that has not begun."""
        return Answer(self, grammar)

    def flush(self) -> None:
        """Send the walker all that has happened."""
        with self._lock:
            if not self._pending or self._walker is None:
                return
            self._walker.put(b"".join(map(encode, self._pending)))
            self._pending.clear()
            if self._walker.unsent:
                self._poke()

    def wait(self, constraints: Collection[Constraint], seconds: float) -> None:
        """Wait until these are ready, but not longer than this."""
        end = time.monotonic() + seconds
        while not all(constraint.is_ready for constraint in constraints) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)

    def sleep(self) -> None:
        """Let the next mask call `on_news`."""
        self._board.loop_sleeps = True

    # --- for answers ---

    def _next_ticket(self) -> int:
        self._tickets += 1
        return self._tickets

    def _open(self, answer: "Answer") -> None:
        with self._lock:
            answer.slot, answer.ticket = self._free_slots.pop(), self._next_ticket()
            self._answers[answer.slot] = answer
            self._pending.append(answer.opening())

    def _close(self, answer: "Answer") -> None:
        with self._lock:
            del self._answers[answer.slot]
            self._free_slots.append(answer.slot)
            self._pending.append(Close(answer.slot))
            answer.slot = -1

    def _accept(self, answer: "Answer", token_id: int) -> None:
        with self._lock:
            answer.tokens.append(token_id)
            answer.ticket = self._next_ticket()
            if not self._pending or not isinstance(self._pending[-1], Accept):
                self._pending.append(Accept([]))
            last = self._pending[-1]
            assert isinstance(last, Accept)
            last.tokens.append((answer.slot, answer.ticket, token_id))

    # --- processes ---

    def _begin(self, order: _Order) -> None:
        """Send a grammar to where it has to go next."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="masks", daemon=True)
            self._thread.start()
        order.num_starts += 1
        if order.is_tried:
            self._pending.append(Compile(order.number, order.grammar, order.num_bytes))
            self.flush()
        elif self._server is not None:
            self._send_to_server(order)

    def _send_to_server(self, order: _Order) -> None:
        assert self._server is not None
        self._server.put(encode(Try(order.number, order.grammar)))
        self._poke()

    def _poke(self) -> None:
        """Let the thread send what the loop could not send without waiting."""
        with contextlib.suppress(BlockingIOError):
            os.write(self._poke_writer, b"\0")

    def _run(self) -> None:
        while True:
            self._start()
            self._read_until_end()
            if self._problem:
                return
            time.sleep(_RESTART_SECONDS)

    def _start(self) -> None:
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
            self._process, self._server, self._walkers = process, _Outbox(server), walkers
            self._start_walker()
            for order in list(self._orders.values()):
                if not order.is_tried:
                    self._send_to_server(order)

    def _start_walker(self) -> None:
        """Start a walker, and open all answers again."""
        assert self._walkers is not None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.suppress(OSError):
            socket.send_fds(self._walkers, [b"w"], [theirs.fileno()])
        for lane in range(len(self._board.list_work())):
            self._board.begin_work(lane, 0)
        self._watched.clear()
        self._walker = _Outbox(ours)
        self._pending[:] = [answer.opening() for answer in self._answers.values() if answer.failure is None]
        self._pending += [Compile(o.number, o.grammar, o.num_bytes) for o in self._orders.values() if o.is_tried]
        self.flush()

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
            if server.connection in readable and not self._receive(server, frames[server], self._handle_server):
                self._end_processes()
                return
            if walker.connection in readable and not self._receive(walker, frames[walker], self._handle_walker):
                walker.connection.close()
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
        for payload in frames.feed(data):
            handle(payload)
        return bool(data)

    def _end_processes(self) -> None:
        """Handle the end of the fork server, and with it of the walker."""
        assert self._process is not None
        assert self._server is not None
        assert self._walkers is not None
        assert self._walker is not None
        with self._lock:
            self._end_work()
            for each in (self._server.connection, self._walkers, self._walker.connection):
                each.close()
            self._server = self._walkers = self._walker = None
            for order in list(self._orders.values()):
                order.num_starts += 1
                if order.num_starts > _STARTS_MAX:
                    self._conclude(order, Verdict(limits.TOO_COSTLY_TO_COMPILE, True))
        self._process.kill()
        _log.warning("event=grammar_process_ended code=%s", self._process.wait())
        self._on_news()

    def _replace_walker(self) -> None:
        _log.warning("event=grammar_walker_ended answers=%d", len(self._answers))
        with self._lock:
            self._end_work()
            self._start_walker()
        self._on_news()

    def _end_work(self) -> None:
        """End what the walker was working on."""
        tickets = set(self._board.list_work()) - {0}
        for answer in self._answers.values():
            if answer.ticket in tickets:
                answer.fail(limits.TOO_COSTLY_TO_FOLLOW, is_too_costly=True)
                if answer.grammar == self._last_fatal:
                    self._keep(key_of(answer.grammar), Verdict(limits.TOO_COSTLY_TO_COMPILE, True))
                self._last_fatal = answer.grammar
        for number in tickets & set(self._orders):
            self._conclude(self._orders[number], Verdict(limits.TOO_COSTLY_TO_COMPILE, True))

    def _watch(self) -> None:
        """Give up a walker that takes too long for one mask. The fork server kills it when the next one starts."""
        now = time.monotonic()
        self._watched = {ticket: self._watched.get(ticket, now) for ticket in self._board.list_work() if ticket}
        if any(now - since > limits.STUCK_SECONDS for since in self._watched.values()):
            assert self._walker is not None
            self._walker.connection.shutdown(socket.SHUT_RDWR)  # its end is noticed next

    # --- messages ---

    def _handle_server(self, payload: bytes) -> None:
        message = from_server_decoder.decode(payload)
        with self._lock:
            if isinstance(message, Loaded):
                if message.problem:
                    self._problem = message.problem
                    for order in list(self._orders.values()):
                        self._conclude(order, Verdict(message.problem))
            elif (tried := self._orders.get(message.number)) is not None:
                order = tried
                if message.problem:
                    self._conclude(order, Verdict(message.problem, message.is_too_costly))
                else:
                    order.is_tried, order.num_bytes = True, message.num_bytes
                    self._begin(order)
                    return
        self._on_news()

    def _handle_walker(self, payload: bytes) -> None:
        message = from_walker_decoder.decode(payload)
        with self._lock:
            if isinstance(message, Started):
                self.walker_pid = message.pid
            elif isinstance(message, Compiled):
                if (order := self._orders.get(message.number)) is not None:
                    self._conclude(order, Verdict(""))
            elif isinstance(message, Broke):
                answer = self._answers.get(message.slot)
                if answer is not None and answer.ticket == message.ticket:
                    answer.fail(message.problem, is_too_costly=message.is_too_costly)
        self._on_news()

    def _conclude(self, order: _Order, verdict: Verdict) -> None:
        self._orders.pop(order.number, None)
        key = key_of(order.grammar)
        self._by_grammar.pop(key, None)
        self._keep(key, verdict)

    def _keep(self, key: bytes, verdict: Verdict) -> None:
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        while len(self._verdicts) > _VERDICTS_MAX:
            self._verdicts.popitem(last=False)


class Answer(Constraint):
    """The state of one answer in its grammar, which the walker has. It has a slot while its request has a row."""

    def __init__(self, masks: Masks, grammar: str) -> None:
        self._masks = masks
        self._board = masks._board
        self.grammar = grammar
        self.tokens = array("I")
        self.slot = -1
        self.ticket = -1
        self._failure: tuple[str, bool] | None = None

    def opening(self) -> Open:
        """Return the message that opens the answer after its tokens."""
        return Open(self.slot, self.ticket, self.grammar, self.tokens.tolist())

    def open(self) -> None:
        self._masks._open(self)

    def close(self) -> None:
        if self.slot >= 0:
            self._masks._close(self)

    def accept(self, token_id: int) -> None:
        self._masks._accept(self, token_id)

    @property
    def is_ready(self) -> bool:
        return self._failure is not None or self._board.has(self.slot, self.ticket)

    @property
    def failure(self) -> tuple[str, bool] | None:
        return self._failure

    def fail(self, problem: str, *, is_too_costly: bool) -> None:
        """Record that the answer cannot go on."""
        self._failure = problem, is_too_costly

    @property
    def is_complete(self) -> bool:
        return self._board.is_complete(self.slot)

    def build_mask(self) -> bytes:
        return self._board.read(self.slot)


def key_of(grammar: str) -> bytes:
    """Return a short name of the grammar."""
    return blake2b(grammar.encode(), digest_size=16).digest()
