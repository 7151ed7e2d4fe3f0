"""The engine process from the side of the API process: its start, its socket, its end and what that means.

Used by `engine_client`, which knows what the messages are about. The other end of the socket is `loop.process`.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from conveyor_engine.logs import LOG_FORMAT_VARIABLE
from conveyor_engine.serving.cgroup import OOM_KILLED, count_oom_kills
from conveyor_engine.wire.messages import FrameReader, FromEngine, ToEngine, encode_frame, from_engine_decoder
from conveyor_process.failure_reasons import FailureReason

ENGINE_PROGRAM = "conveyor_engine.loop.process"
_STOP_SECONDS = 5.0
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Death:
    """Why the engine is dead: the two halves of the termination message."""

    reason: FailureReason
    message: str


class EngineProcess:
    """One process, started once."""

    def __init__(self, program: str, log_format: str) -> None:
        self._program = program
        self._log_format = log_format
        self._oom_kills_before = count_oom_kills()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_end: asyncio.StreamWriter | None = None  # never written to

    async def start(self) -> None:
        """Returns when the process is there."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._program, "--fd", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, LOG_FORMAT_VARIABLE: self._log_format},
                start_new_session=True,  # a terminal's Ctrl-C is for the server, which then drains
            )  # fmt: skip
        _log.info("event=engine_process_started pid=%d", self._process.pid)
        await self.connect(ours)

    async def connect(self, ours: socket.socket) -> None:
        """Talks over this socket. Two transports for it: a write that fails closes its own, not what is to be read."""
        _, self._writer = await asyncio.open_connection(sock=ours)
        cast(asyncio.ReadTransport, self._writer.transport).pause_reading()
        self._reader, self._reader_end = await asyncio.open_connection(sock=ours.dup())

    def send(self, message: ToEngine) -> None:
        """Sends it, unless the process is ending: then `messages` will end too."""
        self.write(encode_frame(message))

    def write(self, frame: bytes) -> None:
        """As `send`, with a message that is encoded already."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def messages(self) -> AsyncIterator[FromEngine]:
        """What the process says, until it says no more. Raises msgspec.DecodeError for what is no message."""
        assert self._reader is not None
        frames = FrameReader()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for payload in frames.feed(data):
                    yield from_engine_decoder.decode(payload)
        except OSError:
            return  # a reset is an end

    async def reap(self) -> int:
        """The process's exit code. It leaves when it has no socket any more; if it does not, it is killed."""
        assert self._process is not None
        self.close()
        try:
            return await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            _log.warning("event=engine_process_killed pid=%d", self._process.pid)
            self._process.kill()
            return await self._process.wait()

    def close(self) -> None:
        """Both halves of the socket."""
        for writer in (self._writer, self._reader_end):
            assert writer is not None
            writer.close()

    def explain(self, exit_code: int) -> Death:
        """What an end without a message means."""
        if exit_code >= 0:
            return Death(FailureReason.ENGINE_ERROR, f"the engine process exited with code {exit_code}")
        if exit_code == -signal.SIGKILL and count_oom_kills() > self._oom_kills_before:
            return Death(FailureReason.OOM_KILLED, OOM_KILLED)
        name = signal.Signals(-exit_code).name
        return Death(FailureReason.ENGINE_ERROR, f"the engine process was ended by {name}")
