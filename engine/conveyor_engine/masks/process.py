"""The fork server for grammars: it reads the model's tokenizer once, and forks trials and the walker.

`client` starts it as a program, and has the other ends of its two sockets: one for messages, and one for the sockets of
walkers. It has one thread, so it may fork. It tries few grammars at a time. A grammar that needs more than a moment
makes way for others, and is tried again in the slow line, one at a time.
"""

import argparse
import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections import deque
from pathlib import Path
from typing import Final

from llguidance import LLTokenizer

from conveyor_engine.masks import limits
from conveyor_engine.masks.board import Board
from conveyor_engine.masks.messages import (
    FromServer,
    Loaded,
    ToServer,
    Tried,
    Try,
    encode,
    result_decoder,
    to_server_decoder,
)
from conveyor_engine.masks.trial import run_trials
from conveyor_engine.masks.walker import run_walker
from conveyor_engine.wire.frames import FrameReader

_NUM_QUICK: Final = 2  # grammars at a time, apart from the slow one
_QUICK_CPU_SECONDS: Final = 0.03  # after this, a grammar is slow
_CLOCK_TIMES: Final = 30  # a grammar may take this many times its processor time on the clock
_TICK_SECONDS: Final = 0.01
_READ_BYTES: Final = 2**20


class _Trial:
    """A process that compiles one grammar at a time."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self.connection = pid, connection
        self.frames = FrameReader()
        self.is_ready = False  # it has sent its first message
        self.order: Try | None = None
        self.is_slow = False
        self._began, self._used = 0.0, 0.0

    def begin(self, order: Try, *, is_slow: bool) -> None:
        """Send it a grammar."""
        self.order, self.is_slow = order, is_slow
        self._began, self._used = time.monotonic(), _used_cpu_seconds(self.pid)
        with contextlib.suppress(OSError):  # its end is noticed when it is read
            self.connection.sendall(encode(order))

    @property
    def is_idle(self) -> bool:
        return self.is_ready and self.order is None

    @property
    def used_seconds(self) -> float:
        """The processor time of its grammar so far."""
        return _used_cpu_seconds(self.pid) - self._used

    @property
    def age_seconds(self) -> float:
        """How long it has had its grammar."""
        return time.monotonic() - self._began


class Server:
    """The loop of the fork server."""

    def __init__(self, tokenizer: LLTokenizer, board: Board, messages: socket.socket, walkers: socket.socket) -> None:
        self._tokenizer, self._board, self._messages, self._walkers = tokenizer, board, messages, walkers
        self._frames = FrameReader()
        self._quick: deque[Try] = deque()
        self._slow: deque[Try] = deque()
        self._trials: list[_Trial] = []
        self._walker_pid = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(messages, selectors.EVENT_READ, None)
        self._selector.register(walkers, selectors.EVENT_READ, None)

    def run(self) -> None:
        """Run until the engine process closes its sockets."""
        while True:
            is_busy = any(trial.order is not None for trial in self._trials)
            for key, _ in self._selector.select(_TICK_SECONDS if is_busy else None):
                if key.fileobj is self._messages:
                    if not (data := self._messages.recv(_READ_BYTES)):
                        return
                    for payload in self._frames.feed(data):
                        self._handle(to_server_decoder.decode(payload))
                elif key.fileobj is self._walkers:
                    if not self._start_walker():
                        return
                elif key.data in self._trials:
                    self._read_trial(key.data)
            self._end_slow_ones()
            self._begin_trials()

    def _handle(self, message: ToServer) -> None:
        if isinstance(message, Try):
            self._quick.append(message)
            return
        self._quick, self._slow = (
            deque(order for order in orders if order.number != message.number) for orders in (self._quick, self._slow)
        )
        for trial in list(self._trials):
            if trial.order is not None and trial.order.number == message.number:
                self._end(trial)

    def close(self) -> None:
        """Kill all children."""
        for pid in [trial.pid for trial in self._trials] + [self._walker_pid]:
            _kill(pid)

    def _start_walker(self) -> bool:
        """Replace the walker by one with the socket that has arrived. Returns False if there will be no more."""
        data, fds, _, _ = socket.recv_fds(self._walkers, 1, 1)
        if not data:
            return False
        connection = socket.socket(fileno=fds[0])
        _kill(self._walker_pid)
        self._walker_pid = 0
        self._walker_pid = os.fork()
        if self._walker_pid == 0:
            self._close_all()
            run_walker(self._tokenizer, self._board, connection)
        connection.close()
        return True

    def _close_all(self) -> None:
        """Close the fork server's sockets in a child, so that each socket has one owner.

        The library writes to standard error when it ends the process. A client could fill the log with that.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
        self._selector.close()
        self._messages.close()
        self._walkers.close()
        for trial in self._trials:
            trial.connection.close()

    def _begin_trials(self) -> None:
        """Give grammars to idle processes, and start processes while grammars wait for one."""
        while (lines := self._list_startable()) and (idle := [trial for trial in self._trials if trial.is_idle]):
            idle[0].begin(lines[0].popleft(), is_slow=lines[0] is self._slow)
        if lines and len(self._trials) < _NUM_QUICK + 1 and not any(trial.is_idle for trial in self._trials):
            self._start_trial()

    def _list_startable(self) -> list[deque[Try]]:
        """Return the lines whose first grammar may begin."""
        busy = [trial for trial in self._trials if trial.order is not None]
        is_quick_full = sum(not trial.is_slow for trial in busy) >= _NUM_QUICK
        is_slow_full = any(trial.is_slow for trial in busy)
        lines = ((self._quick, is_quick_full), (self._slow, is_slow_full))
        return [line for line, is_full in lines if line and not is_full]

    def _start_trial(self) -> None:
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._close_all()
            run_trials(self._tokenizer, theirs)
        theirs.close()
        trial = _Trial(pid, ours)
        self._trials.append(trial)
        self._selector.register(ours, selectors.EVENT_READ, trial)

    def _read_trial(self, trial: _Trial) -> None:
        try:
            data = trial.connection.recv(_READ_BYTES)
        except OSError:
            data = b""
        for result in map(result_decoder.decode, trial.frames.feed(data)):
            if trial.order is not None:
                self._send(Tried(trial.order.number, result.problem, False, result.num_bytes))
            trial.is_ready, trial.order = True, None
            if result.retires:
                self._end(trial)
                return
        if not data:
            self._end(trial)
            if not trial.is_ready:
                raise ChildProcessError("a trial ended before it had a grammar")
            if trial.order is not None:
                self._send(Tried(trial.order.number, limits.TOO_COSTLY_TO_COMPILE, True, 0))

    def _end_slow_ones(self) -> None:
        """Move grammars that need more than a moment to the slow line, and end those that never end."""
        for trial in [trial for trial in self._trials if trial.order is not None]:
            assert trial.order is not None
            if not trial.is_slow and trial.used_seconds > _QUICK_CPU_SECONDS:
                if self._slow or any(other.is_slow and other.order for other in self._trials):
                    self._end(trial)
                    self._slow.append(trial.order)
                else:
                    trial.is_slow = True
            elif trial.age_seconds > _CLOCK_TIMES * limits.COMPILE_CPU_SECONDS:
                self._end(trial)
                self._send(Tried(trial.order.number, limits.TOO_COSTLY_TO_COMPILE, True, 0))

    def _end(self, trial: _Trial) -> None:
        self._trials.remove(trial)
        self._selector.unregister(trial.connection)
        trial.connection.close()
        _kill(trial.pid)

    def _send(self, message: FromServer) -> None:
        self._messages.sendall(encode(message))


def _kill(pid: int) -> None:
    """Kill a child and wait until it has ended."""
    if pid:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _used_cpu_seconds(pid: int) -> float:
    """Return the processor time of a child. The clock's number is that of clock_getcpuclockid(3)."""
    try:
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_engine.masks.process", description=__doc__)
    parser.add_argument("--messages", type=int, required=True, help="an inherited socket")
    parser.add_argument("--walkers", type=int, required=True, help="an inherited socket")
    parser.add_argument("--board", type=int, required=True, help="the inherited shared memory")
    parser.add_argument("--slots", type=int, required=True, help="of the shared memory")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a tokenizer.json")
    parser.add_argument("--vocab-size", type=int, required=True, help="of the model")
    parser.add_argument("--ends", type=int, nargs="*", default=[], help="the tokens that end an answer")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["RUST_BACKTRACE"] = "0"
    messages = socket.socket(fileno=arguments.messages)
    board = Board(arguments.board, arguments.slots, -(-arguments.vocab_size // 8))
    try:
        tokenizer = LLTokenizer(str(arguments.tokenizer), arguments.vocab_size, arguments.ends or None)
    except BaseException as error:  # a tokenizer.json may cause any error, and a panic of the library too
        messages.sendall(encode(Loaded(f"this model's tokenizer cannot follow structured output: {error}")))
        return
    messages.sendall(encode(Loaded("")))
    gc.freeze()
    server = Server(tokenizer, board, messages, socket.socket(fileno=arguments.walkers))
    try:
        server.run()
    except ConnectionError:
        pass  # the engine process has ended
    finally:
        server.close()


if __name__ == "__main__":
    main()
    sys.stderr.flush()
