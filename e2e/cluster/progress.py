"""Prints progress, so that no step of the set-up is silent for more than a quarter of a minute.

Called by whatever takes long. Lines, not bars: several steps run side by side, and their output may go to a file.
"""

import contextlib
import threading
import time
from collections.abc import Iterator

SILENT_SECONDS_MAX = 15.0


@contextlib.contextmanager
def announced(what: str) -> Iterator[None]:
    """Prints that `what` begins, every quarter of a minute that it goes on, and how long it took if it succeeds."""
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
