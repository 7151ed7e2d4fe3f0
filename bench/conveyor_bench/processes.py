"""Starts processes for measurements: the product's programs, and parts of a measurement.

Used by `batchers`, `paint-served`, `gateway`, `gateway-beside`, `control` and `hostile`.
"""

import contextlib
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

_END_SECONDS: Final = 30.0
_LOOK_SECONDS: Final = 0.25


class Child:
    """A module of this package as a process with pipes. The process ends when its standard input closes."""

    def __init__(self, module: str, *arguments: str) -> None:
        command = [sys.executable, "-m", f"conveyor_bench.{module}", *arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def read_line(self) -> str:
        """Wait for the next line that the process prints, and return it."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def send(self) -> str:
        """Send an empty line, and return the line that answers it."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self.read_line()

    def end(self) -> str:
        """Close the standard input. Returns the output of the process until it ends."""
        return self._process.communicate("")[0]


@contextlib.contextmanager
def running(program: str, kubeconfig: Path, *flags: str, log: int | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Run `python -m PROGRAM` on the loopback, with a free admin port unless the flags name one."""
    command = [sys.executable, "-m", program, f"--kubeconfig={kubeconfig}", "--host=127.0.0.1", "--admin-port=0"]
    process = subprocess.Popen([*command, "--log-level=warning", *flags], stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


def resident_mib(pid: int) -> float:
    """Return the resident MiB of the process; 0 if it is a zombie."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def peak_mib(pid: int) -> float:
    """Return the most resident MiB of the process since its start; 0 if it has ended."""
    with contextlib.suppress(OSError):
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return int(found[1]) / 1024 if found else 0.0
    return 0.0


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of all threads of the process, to the nanosecond (`/proc/PID/stat` has ticks)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def start(command: Sequence[str], environment: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
    """Start the process in its own session, so that Ctrl-C reaches only this program, which then ends the process."""
    with log.open("a") as log_file:
        return subprocess.Popen(command, stdout=log_file, stderr=log_file, env=environment, start_new_session=True)


def end_in_order() -> None:
    """Let SIGTERM end this program as Ctrl-C does: it then ends the processes that it has started."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def find_ports() -> int:
    """Return the first of three consecutive free ports, because Triton listens at three."""
    while True:
        with socket.socket() as first:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
        with socket.socket() as second, socket.socket() as third, contextlib.suppress(OSError, OverflowError):
            second.bind(("127.0.0.1", port + 1))
            third.bind(("127.0.0.1", port + 2))
            return port


def end(process: "subprocess.Popen[bytes]") -> None:
    """End the process and all processes in its process group."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    begin = time.monotonic()
    while time.monotonic() - begin < _END_SECONDS:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        time.sleep(_LOOK_SECONDS)
