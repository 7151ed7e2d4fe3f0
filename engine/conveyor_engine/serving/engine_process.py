"""Starts and ends the engine process and exchanges messages with it through a socket.

Used by `engine_client`, which knows what the messages mean. The other end of the socket is `loop.process`.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import cast

from conveyor_engine.cgroup import count_oom_kills, explain_exit
from conveyor_engine.logs import LOG_FORMAT_VARIABLE
from conveyor_engine.openmp import spin_briefly
from conveyor_engine.wire.frames import FrameReader, encode_frame
from conveyor_engine.wire.messages import FromEngine, ToEngine, from_engine_decoder
from conveyor_protocol.failure_reasons import FailureReason

ENGINE_PROGRAM = "conveyor_engine.loop.process"
_STOP_SECONDS = 5.0
_READ_BYTES = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Death:
    """Why the engine is dead. The termination message of the container consists of these two fields."""

    reason: FailureReason
    message: str


class EngineProcess:
    """One engine process. It is started once."""

    def __init__(self, program: str, log_format: str) -> None:
        self._program = program
        self._log_format = log_format
        self._oom_kills_before = count_oom_kills()
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader_end: asyncio.StreamWriter | None = None  # closes the reading transport; nothing is written to it

    async def start(self) -> None:
        """Start the process. Does not wait until it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", self._program, "--fd", str(theirs.fileno()),
                pass_fds=[theirs.fileno()], stdin=asyncio.subprocess.DEVNULL,
                env={**spin_briefly(os.environ), LOG_FORMAT_VARIABLE: self._log_format},
                start_new_session=True,  # a terminal's Ctrl-C is for the server, which then drains
            )  # fmt: skip
        _log.info("event=engine_process_started pid=%d", self._process.pid)
        await self.connect(ours)

    async def connect(self, ours: socket.socket) -> None:
        """Open the socket with two transports. A failed write closes its transport, and the other one still reads."""
        _, self._writer = await asyncio.open_connection(sock=ours)
        cast(asyncio.ReadTransport, self._writer.transport).pause_reading()
        self._reader, self._reader_end = await asyncio.open_connection(sock=ours.dup())

    def send(self, message: ToEngine) -> None:
        """Send the message. If the process is ending, drop the message, because `messages` will end too."""
        self.write(encode_frame(message))

    def write(self, frame: bytes) -> None:
        """Send a message that is already encoded, as `send` does."""
        assert self._writer is not None
        if not self._writer.is_closing():
            self._writer.write(frame)

    async def messages(self) -> AsyncIterator[FromEngine]:
        """Yield the process's messages until its socket closes. Raises msgspec.DecodeError for an invalid message."""
        assert self._reader is not None
        frames = FrameReader()
        try:
            while data := await self._reader.read(_READ_BYTES):
                for payload in frames.feed(data):
                    yield from_engine_decoder.decode(payload)
        except OSError:
            return  # a reset connection ends the messages too

    async def reap(self) -> int:
        """Close the socket, so that the process exits; kill it if it does not. Returns its exit code."""
        assert self._process is not None
        self.close()
        try:
            return await asyncio.wait_for(self._process.wait(), _STOP_SECONDS)
        except TimeoutError:
            _log.warning("event=engine_process_killed pid=%d", self._process.pid)
            self._process.kill()
            return await self._process.wait()

    def close(self) -> None:
        """Close both transports."""
        for writer in (self._writer, self._reader_end):
            assert writer is not None
            writer.close()

    def explain(self, exit_code: int) -> Death:
        """Return the cause of death of a process that did not send one."""
        return Death(*explain_exit("the engine process", exit_code, self._oom_kills_before))
