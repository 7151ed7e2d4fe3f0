"""Starts processes, records them in a file, and stops exactly those.

Used by the control plane and the local cluster. A process is identified by its id and its start time. So a process that
later gets the same id is never signalled. Knows nothing of what the processes do.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e.cluster import programs

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The identity of a process: its id, and its start time in clock ticks since boot."""

    name: str
    pid: int
    started_ticks: int

    def alive(self) -> bool:
        return started_ticks(self.pid) == self.started_ticks


class ProcessFailed(RuntimeError):
    """A process ended, or was not ready in time. The message contains the end of its log."""


class Processes:
    """The processes of one cluster, recorded in `<folder>/processes.jsonl`, their logs in `<folder>/logs`."""

    def __init__(self, folder: Path, die_with_parent: bool) -> None:
        """die_with_parent: the kernel kills the processes when the thread that started them ends."""
        self._folder = folder
        self._file = folder / "processes.jsonl"
        self._die_with_parent = die_with_parent
        self._children: list[subprocess.Popen[bytes]] = []
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def start(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] = {}) -> None:
        """Start a program of `programs`. Its name is the first word of the command."""
        program, *arguments = map(str, command)
        with self.log(name).open("ab") as log:
            child = programs.start(
                program,
                *arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                env={**os.environ, "PATH": programs.search_path(), **environment},
                start_new_session=True,
                preexec_fn=lambda: self.record(name),
            )
        self._children.append(child)

    def record(self, name: str) -> None:
        """Record the calling process.

        Called in a child before its program runs, so that all started processes are recorded.
        """
        if self._die_with_parent:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        own = Recorded(name, os.getpid(), started_ticks(os.getpid()) or 0)
        with self._file.open("a") as file:
            file.write(json.dumps(asdict(own)) + "\n")

    def log(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"

    def recorded(self) -> list[Recorded]:
        if not self._file.exists():
            return []
        return [Recorded(**json.loads(line)) for line in self._file.read_text().splitlines()]

    def check(self) -> None:
        """Raise `ProcessFailed` with the end of its log if a process has ended."""
        for process in self.recorded():
            if not process.alive():
                tail = self.log(process.name).read_text(errors="replace")[-3000:]
                raise ProcessFailed(f"{process.name} has ended; its log ends with:\n{tail}")

    def stop(self, names: Sequence[str] = (), grace_seconds: float = 5) -> None:
        """Stop the named processes (without names: all), the latest first. Kills those that do not end in time."""
        chosen = [process for process in self.recorded() if not names or process.name in names]
        for process in reversed(chosen):
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while self._any_alive(chosen) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in chosen:
            _signal(process, signal.SIGKILL)
        while self._any_alive(chosen):
            time.sleep(0.02)
        for child in self._children:
            if any(child.pid == process.pid for process in chosen):
                child.wait()
        self._write([process for process in self.recorded() if process not in chosen])

    def _any_alive(self, processes: Sequence[Recorded]) -> bool:
        return any(process.alive() for process in processes)

    def _write(self, processes: Sequence[Recorded]) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text("".join(json.dumps(asdict(process)) + "\n" for process in processes))
        partial.rename(self._file)


def started_ticks(pid: int) -> int | None:
    """Return the start time of a living process; None if it does not exist or is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the name before ")" may contain spaces
    return None if fields[0] in "ZX" else int(fields[19])


def _signal(process: Recorded, number: signal.Signals) -> None:
    if process.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
