"""Prints progress, so that no step of the set-up is silent for more than 15 seconds.

Called by everything that takes long. Prints lines, not bars, because several steps run in parallel and the output may
go to a file.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

SILENT_SECONDS_MAX = 15.0


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Print that `what` begins, then every 15 seconds that it still runs, and at the end how long it took if it
    succeeded."""
    started, ended = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not ended.wait(SILENT_SECONDS_MAX):
            print(f"{what}: {time.monotonic() - started:.0f} s ...", flush=True)

    print(f"{what} ...", flush=True)
    speaker = threading.Thread(target=repeat, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
    print(f"{what}: done in {time.monotonic() - started:.0f} s", flush=True)
