"""Limits the CPU time and memory of reading files that a tenant wrote.

Reading such a file can take any time and memory, or end the process. So a child process with limits reads it first.
"""

import json
import math
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NoReturn

from conveyor_engine.errors import ModelError
from conveyor_protocol.failure_reasons import FailureReason

MEMORY_BYTES: Final = 2 * 2**30
_STATM: Final = Path("/proc/self/statm")
_CLOCK_TIMES: Final = 30.0  # the child's limit on elapsed time is this many times its limit on CPU time


def run_limited(what: str, load: Callable[[], object], cpu_seconds: float) -> None:
    """Call `load` in a forked child process with limits.

    Raises the ModelError that `load` raises, or a ModelError with the limits if `load` does not complete.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run(load, writer, cpu_seconds)
    os.close(writer)
    try:
        said = _read(reader, _CLOCK_TIMES * cpu_seconds)
    finally:
        os.close(reader)
        os.kill(pid, signal.SIGKILL)  # has no effect if the child has ended
        status = os.waitpid(pid, 0)[1]
    if said is None:
        raise ModelError(f"{what} takes more than {_CLOCK_TIMES * cpu_seconds:g} s to read")
    if said:
        content = json.loads(said)
        raise ModelError(content["message"], reason=FailureReason(content["reason"]))
    if os.waitstatus_to_exitcode(status) != 0:
        limits = f"{cpu_seconds:g} s of CPU time or {MEMORY_BYTES >> 30} GiB of memory"
        raise ModelError(f"{what} takes more than {limits} to read, or ends the process that reads it")


def _read(reader: int, seconds: float) -> bytes | None:
    """Return all that the child has written, once the child has ended; None if it does not end in time."""
    end, said = time.monotonic() + seconds, b""
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (data := os.read(reader, 2**16)):
            return said
        said += data
    return None


def _run(load: Callable[[], object], writer: int, cpu_seconds: float) -> NoReturn:
    """Run the child process. It writes nothing if `load` succeeds."""
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["RUST_BACKTRACE"] = "0"
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread for each CPU would take too much address space
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit_cpu_seconds(cpu_seconds)
        limit_more_memory(MEMORY_BYTES)
        load()
        code = 0
    except ModelError as error:
        os.write(writer, json.dumps({"reason": error.reason, "message": str(error)}).encode())
    finally:
        os._exit(code)


def limit_cpu_seconds(seconds: float) -> None:
    """Limit this process to that many more seconds of CPU time. The kernel kills it at the limit."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _limit(resource.RLIMIT_CPU, math.ceil(used + seconds))


def limit_more_memory(num_bytes: int) -> None:
    """Limit this process to that much more memory. Allocations beyond it fail. macOS has no such limit."""
    if _STATM.exists():
        _limit(resource.RLIMIT_AS, _virtual_bytes() + num_bytes)


def peak_bytes() -> int:
    """Return the most memory that this process has had."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _virtual_bytes() -> int:
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()
