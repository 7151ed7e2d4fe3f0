"""Estimates how long a request that found the queue full would have waited, for `Retry-After`.

Used by `dispatcher` only. Pure bookkeeping: the clock is an argument. The cost of an event does not depend on
how many requests wait.
"""

import math
from collections.abc import Iterable
from typing import Final

from conveyor_gateway.admission.waiting import Waiting

RETRY_AFTER_SECONDS_MAX: Final = 60  # OpenAI's clients ignore longer waits
_LATELY_SECONDS: Final = 15.0  # time constant of the decay: an event of this age counts 0.37
_ASSUMED: Final = 0.1  # prior: 0.1 places in 0.1 seconds, so one place a second before any is counted


class WaitEstimate:
    """The rates at which requests of each level get places while others wait.

    Time without a backlog and requests that get their places immediately do not count. They do not show how fast a
    backlog shrinks. But all counts decay by the clock, also without a backlog: refused clients wait as long as the
    estimate says, so one slow minute would otherwise stay in it for as long as they obey.
    """

    def __init__(self, now: float) -> None:
        self.has_backlog = False
        self._at = now
        self._seconds = 0.0  # the time with a backlog, decaying
        self._left: dict[int, tuple[float, float]] = {}  # by level: a decaying count, and the time of its last event

    def tick(self, now: float) -> None:
        """Advance the clock. The time since the last call counts as backlog time if `has_backlog` is set."""
        kept = math.exp((self._at - now) / _LATELY_SECONDS)
        self._seconds = self._seconds * kept + _LATELY_SECONDS * (1 - kept) * self.has_backlog
        self._at = now

    def count(self, level: int) -> None:
        """Count a request of this level that has got a place."""
        if self.has_backlog:
            self._left[level] = (self._count(level) + 1, self._at)

    def keep(self, levels: set[int]) -> None:
        """Drop the counts of all levels except these."""
        self._left = {level: left for level, left in self._left.items() if level in levels}

    def find_wait_seconds(self, level: int, waiting: Waiting) -> int:
        """Return how long a request of this level would wait, in whole seconds between 1 and RETRY_AFTER_SECONDS_MAX.

        The first estimate divides the number of requests with this or a more urgent level by their common rate. A level
        may get places more slowly, because of its class's share or because more urgent levels go first. So the second
        estimate is for this level alone, and the longer estimate counts.
        """
        levels = [each for each in waiting.levels if each <= level]
        waits = [sum(map(waiting.count, levels)) / self._per_second(levels)]
        if level in self._left:
            waits.append(waiting.count(level) / self._per_second([level]))
        return max(1, math.ceil(min(RETRY_AFTER_SECONDS_MAX, max(waits))))

    def _per_second(self, levels: Iterable[int]) -> float:
        return (sum(map(self._count, levels)) + _ASSUMED) / (self._seconds + _ASSUMED)

    def _count(self, level: int) -> float:
        count, at = self._left.get(level, (0.0, 0.0))
        return count * math.exp((at - self._at) / _LATELY_SECONDS)
