"""A token bucket that may go into debt. Pure: the clock is an argument. Used by `meters` only."""

import math
from typing import Final

_PERIOD_SECONDS: Final = 60.0


class Bucket:
    """What is left of an amount for each minute. It fills evenly, so a full bucket allows a burst of a whole minute.

    The amount may change between calls. More may be taken than there is: then the bucket is in debt until it has
    filled again.
    """

    __slots__ = ("_at", "_left")

    def __init__(self, amount: float, now: float) -> None:
        self._left = amount
        self._at = now

    def find_left(self, amount: float, now: float) -> float:
        """Return what is left of `amount` for each minute; negative while in debt."""
        self._left = min(amount, self._left + (now - self._at) * amount / _PERIOD_SECONDS)
        self._at = now
        return self._left

    def take(self, taken: float) -> None:
        """Take this much, or give it back if it is negative."""
        self._left -= taken

    def find_wait_seconds(self, needed: float, amount: float) -> float:
        """Return how long it takes until `needed` is left, which is at most `amount`; 0 if it is. After `find_left`."""
        return max(0.0, (needed - self._left) * _PERIOD_SECONDS / amount)


def write_wait(seconds: float) -> str:
    """Return a wait as OpenAI's headers have it, such as 1s or 6m0s."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
