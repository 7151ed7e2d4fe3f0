"""A lock, so that only one command at a time changes the cluster of a cache folder.

Called by the command line. The kernel releases the lock when the process that holds it ends for any reason.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

from e2e.cluster.paths import CACHE


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """Wait until no other process holds the lock. Prints once that it waits."""
    CACHE.mkdir(parents=True, exist_ok=True)
    file = os.open(CACHE / "cluster.lock", os.O_CREAT | os.O_RDONLY, 0o644)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another command is at work on the cluster; waiting for it to end ...", flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
