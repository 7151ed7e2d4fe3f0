"""The parent of the local cluster's processes: starts them, waits for those that end, and stops them in their order.

A process of its own, started by `local.up` and ended by `local.down` with SIGTERM. Whatever becomes an orphan
below it (a shim of containerd, a container's process) becomes its child. So nothing is left as a zombie where the
machine's first process reaps no orphans, as in many containers; only the keeper itself cannot be waited for there.
"""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import REPOSITORY

NAME = "keeper"
_PR_SET_CHILD_SUBREAPER = 36
_STARTED = b"started"


def launch(module: str) -> bool:
    """Run a module that calls `keep` in its own process, and wait until it has started everything.

    Returns whether it succeeded. If not, it has stopped everything and printed why.
    """
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as answer:
        try:
            command = ("-m", module, str(writer))
            kept = programs.start("python", *command, cwd=REPOSITORY, pass_fds=[writer], start_new_session=True)
        finally:
            os.close(writer)
        try:
            said = answer.read()
        except BaseException:
            kept.terminate()
            kept.wait()
            raise
    if said == _STARTED:
        kept.returncode = 0  # it keeps running; this process does not wait for it
        return True
    kept.wait()
    return False


def keep(start: Callable[[], None], stop: Callable[[], None], log: Path, answer: int) -> None:
    """Calls `start`, then waits for SIGTERM, then calls `stop`; reaps every orphan in between and at the end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # while it starts
    try:
        start()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
        _detach(log)
        os.write(answer, _STARTED)
        os.close(answer)
        while signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGCHLD:
            _reap(os.WNOHANG)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})  # what `stop` runs inherits it
        stop()
        _reap(0)


def _reap(options: int) -> None:
    """Waits for children: for those that have ended, or with options 0 for all."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _detach(log: Path) -> None:
    """Detach from the terminal. Later output goes to a file."""
    sys.stdout.flush()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
