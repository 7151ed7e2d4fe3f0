"""Limits the memory that this process uses for clients' bodies and answers. Used by `reading` and `engine_response`.

Above the limit, the request with the largest product of held bytes and age is evicted. So a client that sends or reads
slowly on purpose cannot displace others.
"""

import asyncio
import time
from types import TracebackType
from typing import Self

from conveyor_engine.errors import DeadlineExceeded, Overloaded

HELD_BYTES_MAX = 128 * 2**20
_FREE_BYTES = 64 * 2**10  # of each request that are not counted; the limit on connections limits their sum


class Memory:
    """The limit, and all requests that hold memory."""

    def __init__(self, max_bytes: int = HELD_BYTES_MAX) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._holders: set[Held] = set()

    def hold(self, seconds: float) -> "Held":
        """Return a context manager for the task of one request. After `seconds` it cancels the block."""
        return Held(self, seconds)

    def _add(self, holder: "Held", num_bytes: int) -> None:
        self._holders.add(holder)
        self._num_bytes += num_bytes
        now = time.monotonic()
        while self._num_bytes > self._max_bytes:
            max(self._holders, key=lambda held: held.num_counted * (now - held.since)).evict()

    def _remove(self, holder: "Held") -> None:
        if holder in self._holders:
            self._holders.remove(holder)
            self._num_bytes -= holder.num_counted


class Held:
    """The memory of one request.

    Leaving the block raises Overloaded after an eviction, and DeadlineExceeded after a timeout.
    """

    def __init__(self, memory: Memory, seconds: float) -> None:
        self._memory = memory
        self._num_bytes = 0
        self._gave_way = False
        self._seconds = seconds
        self._timeout = asyncio.timeout(None)
        self.since = time.monotonic()

    @property
    def num_counted(self) -> int:
        """The number of bytes of this request that count towards the limit."""
        return _counted(self._num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Add a number of bytes, which may be negative."""
        before = self._num_bytes
        self._num_bytes += num_bytes
        if max(before, self._num_bytes) > _FREE_BYTES and not self._gave_way:
            self._memory._add(self, _counted(self._num_bytes) - _counted(before))

    def evict(self) -> None:
        """Free the memory and cancel the block."""
        self._memory._remove(self)
        self._gave_way = True
        if not self._timeout.expired():  # otherwise its task is already cancelled
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timeout.reschedule(asyncio.get_running_loop().time() + self._seconds)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._gave_way:
            self._memory._remove(self)
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError:
            if self._gave_way:
                raise Overloaded("the server's memory is full, and this request held most of it; try again") from None
            raise DeadlineExceeded("the request's time ran out before its answer was complete") from None


def _counted(num_bytes: int) -> int:
    """Return the number of bytes above `_FREE_BYTES`."""
    return max(0, num_bytes - _FREE_BYTES)
