"""How many requests a job has in flight: more while the service has room, half as many when it has none. Pure.

Additive increase and multiplicative decrease, as in TCP (Chiu and Jain, "Analysis of the increase and decrease
algorithms for congestion avoidance in computer networks", 1989; slow start: RFC 5681, section 3.1). The signal is that
the gateway refuses a request because its queue is full. Used by `job`; the clock is an argument.
"""

from typing import Final

_START: Final = 4


class Concurrency:
    """The current limit, between 1 and `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._value = float(min(_START, most))
        self._is_starting = True  # until the first refusal, each response adds one
        self._lowered_at = float("-inf")

    @property
    def limit(self) -> int:
        return int(self._value)

    def note_answer(self) -> None:
        """Raise the limit after a response: by one for each whole round of responses."""
        self._value = min(self._most, self._value + (1.0 if self._is_starting else 1.0 / self._value))

    def note_refusal(self, sent_at: float, now: float) -> None:
        """Halve the limit after a refusal. `sent_at`: when the refused request was sent.

        A request that was sent before the last reduction says nothing about the lower limit.
        """
        self._is_starting = False
        if sent_at >= self._lowered_at:
            self._value = max(1.0, self._value / 2)
            self._lowered_at = now
