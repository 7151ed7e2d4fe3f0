"""Starts a Python module as a process with a log file, and ends it. Used by `pod` and `jobs`.

Each process has its own session, so that a terminal's Ctrl-C reaches only `conveyor run`, which then drains.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_LAST_LINES_BYTES: Final = 2048  # of a log, as the kubelet keeps them


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """A module with its arguments and its environment."""

    module: str
    arguments: Sequence[str]
    environment: Mapping[str, str]


class Process:
    """A running process, whose output is appended to a log file."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path, begin: int) -> None:
        self._process = process
        self._log = log
        self._begin = begin

    @classmethod
    async def start(cls, program: ChildProgram, log: Path) -> "Process":
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            begin = output.tell()
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "conveyor_local.leash", str(os.getpid()), program.module, *program.arguments,
                env=dict(program.environment), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip
        return cls(process, log, begin)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        """Wait for the end. Returns the exit code, negative for a signal. Removes processes that it left behind."""
        code = await self._process.wait()
        self._signal(signal.SIGKILL)
        return code

    async def stop(self, within_seconds: float) -> None:
        """Send SIGTERM, and SIGKILL if the process has not ended in time. The caller of `wait` gets the exit code."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), within_seconds)
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def read_log(self) -> str:
        """Return the output of this process."""
        with self._log.open("rb") as log:
            log.seek(self._begin)
            return log.read().decode(errors="replace")

    def read_last_lines(self) -> str:
        """Return the end of the output, as much as the kubelet keeps."""
        text = self.read_log()
        return text if len(text) <= _LAST_LINES_BYTES else text[-_LAST_LINES_BYTES:].partition("\n")[2]
