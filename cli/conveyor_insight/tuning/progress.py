"""Shows the progress of a sweep: a bar on a terminal, or a line for each run if the output is a file."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

from conveyor_api.text import make_printable

_WIDTH: Final = 24


class Progress:
    """The progress over about `total` runs."""

    def __init__(self, total: int, stream: TextIO = sys.stderr) -> None:
        self._total, self._stream = total, stream
        self._done = 0
        self._is_drawn = False

    @contextmanager
    def trial(self, text: str, requests: int) -> Iterator[Callable[[int], None]]:
        """Show one run. Yields a function to call with the number of requests sent so far."""
        if not self._stream.isatty():
            self.say(text)
        yield lambda sent: self._draw(text, sent / requests)
        self._done += 1
        self._total = max(self._total, self._done)

    def say(self, text: str) -> None:
        """Remove the bar, then print a line."""
        self.clear()
        print(make_printable(text), file=self._stream, flush=True)

    def clear(self) -> None:
        """Remove the bar."""
        if self._is_drawn:
            print("\r\x1b[K", end="", file=self._stream, flush=True)
            self._is_drawn = False

    def _draw(self, text: str, share: float) -> None:
        if not self._stream.isatty():
            return
        filled = round(min(1.0, (self._done + share) / max(self._total, self._done + 1)) * _WIDTH)
        bar = f"[{'#' * filled}{'.' * (_WIDTH - filled)}] run {self._done + 1} of about {self._total}, {text}"
        print(f"\r\x1b[K{make_printable(bar)[:118]}", end="", file=self._stream, flush=True)
        self._is_drawn = True
