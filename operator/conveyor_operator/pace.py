"""Limits the rate of calls to the API server. Used by `cluster`."""

import asyncio

_BURST_SECONDS = 1.0


class Pace:
    """Allows `per_second` calls a second on average and, after a pause of a second, a burst of as many calls.

    Uses the generic cell rate algorithm (ITU-T I.371).
    """

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._next = 0.0

    async def wait(self) -> float:
        """Wait until the next call may start, first come, first served; return the seconds waited."""
        now = asyncio.get_running_loop().time()
        self._next = max(self._next, now - _BURST_SECONDS) + self._interval
        seconds = max(0.0, self._next - now)
        if seconds:
            await asyncio.sleep(seconds)
        return seconds
