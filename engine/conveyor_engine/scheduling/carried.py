"""How many requests the KV cache carried at once lately. Used by `scheduler` alone; pure, the clock is an argument.

A cache that was never short says nothing: then the batch is the limit. The autoscaler measures requests in flight
against it.
"""

from typing import Final

_LATELY_SECONDS: Final = 60.0  # what is older counts for about a third
_LONGEST_PAUSE_SECONDS: Final = 1.0  # between two steps; a time without requests is not lately


class Carried:
    """Means over the time in which requests ran."""

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._at = 0.0
        self._running = 0.0
        self._used = 0.0
        self._number: float | None = None

    @property
    def number(self) -> int | None:
        """None while the cache has room for the whole batch, as far as is known."""
        return None if self._number is None else max(1, round(self._number))

    def note(self, now: float, num_running: int, usage: float, short: bool) -> None:
        """With each step planned: the requests that run, their share of the blocks, and whether there were too few.

        As many as ran when blocks were short is what it carried. When they are not, as many of the same size as would
        fit may be more.
        """
        weight = min(now - self._at, _LONGEST_PAUSE_SECONDS) / _LATELY_SECONDS
        self._at = now
        self._running += weight * (num_running - self._running)
        self._used += weight * (usage - self._used)
        fit = self._running / self._used if self._used > 0 else 0.0
        if self._number is not None:
            seen = num_running if short else max(self._number, fit)
            self._number += weight * (seen - self._number)
        elif short:
            self._number = max(num_running, fit)
        if self._number is not None and round(self._number) >= self._max_num_seqs:
            self._number = None
