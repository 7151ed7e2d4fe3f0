"""Runs the parent of the local cluster's processes: it starts them, waits for those that end, and stops them in order.

It is a process of its own. `local.up` starts it, and `local.down` ends it with SIGTERM. Orphans below it (a shim of
containerd, a container's process) become its children. So no zombies remain on machines whose first process does not
reap orphans, as in many containers. Only the keeper itself may remain as a zombie there.
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
            body = answer.read()
        except BaseException:
            kept.terminate()
            kept.wait()
            raise
    if body == _STARTED:
        kept.returncode = 0  # it keeps running; this process does not wait for it
        return True
    kept.wait()
    return False


def keep(start: Callable[[], None], stop: Callable[[], None], log: Path, answer: int) -> None:
    """Call `start`, wait for SIGTERM, then call `stop`. Reap all orphans meanwhile and at the end."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # while `start` runs
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
        # The programs that `stop` starts inherit the signal mask.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        stop()
        _reap(0)


def _reap(options: int) -> None:
    """Wait for children: for those that have ended, or with options 0 for all."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, options)[0]:
            pass


def _detach(log: Path) -> None:
    """Detach from the terminal. Later output goes to a file."""
    sys.stdout.flush()
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
