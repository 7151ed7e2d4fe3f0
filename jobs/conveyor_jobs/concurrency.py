"""How many requests a job has in flight, and when it may send the next one. Pure.

Additive increase and multiplicative decrease, as in TCP (Chiu and Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance in computer networks", 1989). The signal is that the service refuses a request.
After a refusal, nothing is sent until a response shows that there is room again, or until a pause is over. Times
are of one clock, in seconds.
"""

import random
from typing import Final

_START: Final = 4
_FIRST_PAUSE_SECONDS: Final = 1.0
_LAST_PAUSE_SECONDS: Final = 60.0


class Concurrency:
    """The current limit, between 1 and `most`, and the time before which nothing may be sent."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._value = float(min(_START, most))
        # Between this value and twice this value, where the service was last full, the limit grows by one for each
        # round of responses. Below and above, each response adds one, which doubles the limit in each round.
        self._careful_from = float("inf")
        self._changed_at = float("-inf")  # by the last refusal
        self._num_pauses = 0  # since the last response
        self.open_at = float("-inf")

    @property
    def limit(self) -> int:
        return int(self._value)

    def note_answer(self) -> None:
        """Raise the limit after a response, and end the pause."""
        is_careful = self._careful_from <= self._value < 2 * self._careful_from
        self._value = min(self._most, self._value + (1.0 / self._value if is_careful else 1.0))
        self._num_pauses, self.open_at = 0, float("-inf")

    def note_full(self, sent_at: float, now: float, retry_after: float) -> None:
        """Halve the limit after a refusal by a full queue."""
        if self._pause(sent_at, now, retry_after):
            self._value = self._careful_from = max(1.0, self._value / 2)

    def note_absent(self, sent_at: float, now: float, retry_after: float) -> None:
        """Begin again after a refusal that says nothing about room: the service starts, or cannot be reached."""
        if self._pause(sent_at, now, retry_after):
            self._value = min(self._value, _START)

    def _pause(self, sent_at: float, now: float, retry_after: float) -> bool:
        """Send nothing for `retry_after` seconds, or for longer with each pause if that is 0.

        Returns False for a request that was sent before the last change: it says nothing about the present limit.
        """
        if sent_at < self._changed_at:
            return False
        self._changed_at = now
        self._num_pauses += 1
        pause = choose_pause(self._num_pauses, retry_after)
        self.open_at = max(self.open_at, now + pause)
        return True


def choose_pause(times: int, retry_after: float = 0.0) -> float:
    """Return the seconds until the next attempt: those that the service names, or longer each time, and some more.

    The random part keeps several jobs apart. A service may name at most 60 seconds.
    """
    pause = retry_after or _FIRST_PAUSE_SECONDS * 2.0 ** min(times - 1, 10)
    return min(_LAST_PAUSE_SECONDS, pause) * random.uniform(1.0, 1.25)
