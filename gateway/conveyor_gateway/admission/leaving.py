"""How soon a request that finds the queue full would have had its turn: what `Retry-After` says. Used by `dispatcher`.

Pure bookkeeping: the clock is an argument. An event costs the same however many requests wait.
"""

import math
from collections.abc import Iterable
from typing import Final

from conveyor_gateway.admission.waiting import Waiting

RETRY_AFTER_SECONDS_MAX: Final = 60  # OpenAI's clients wait no longer
_LATELY_SECONDS: Final = 30.0  # of a backlog; what is older counts for about a third
_ASSUMED: Final = 0.1  # places, in as many seconds: what is known before any came free


class Leaving:
    """The rates at which requests of each level get places, counted while others wait.

    Time without a backlog does not count, and neither does a request that gets its place at once: both say nothing of
    how fast a backlog goes.
    """

    def __init__(self, now: float) -> None:
        self.has_backlog = False
        self._at = now
        self._seconds = 0.0  # with a backlog
        self._left: dict[int, tuple[float, float]] = {}  # by level: a decaying count, and `_seconds` at its last event

    def tick(self, now: float) -> None:
        """Time has passed, with a backlog if `has_backlog` was set last."""
        self._seconds += (now - self._at) * self.has_backlog
        self._at = now

    def count(self, level: int) -> None:
        """A request of this level has got a place."""
        if self.has_backlog:
            self._left[level] = (self._count(level) + 1, self._seconds)

    def keep(self, levels: set[int]) -> None:
        """The service has these levels now."""
        self._left = {level: left for level, left in self._left.items() if level in levels}

    def find_wait_seconds(self, level: int, waiting: Waiting) -> int:
        """How long a request of this level waits for all that is ahead of it, in whole seconds, from 1 to the most.

        Ahead are its own level and all better ones. A level that gets fewer places than those together, because of its
        share or because it yields, waits for its own.
        """
        levels = [each for each in waiting.levels if each <= level]
        waits = [sum(map(waiting.count, levels)) / self._per_second(levels)]
        if level in self._left:
            waits.append(waiting.count(level) / self._per_second([level]))
        return max(1, math.ceil(min(RETRY_AFTER_SECONDS_MAX, max(waits))))

    def _per_second(self, levels: Iterable[int]) -> float:
        seconds = _LATELY_SECONDS * -math.expm1(-self._seconds / _LATELY_SECONDS)
        return (sum(map(self._count, levels)) + _ASSUMED) / (seconds + _ASSUMED)

    def _count(self, level: int) -> float:
        count, at = self._left.get(level, (0.0, 0.0))
        return count * math.exp((at - self._seconds) / _LATELY_SECONDS)
