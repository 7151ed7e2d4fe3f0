"""Limits how many of the batch's rows and KV blocks the requests of high (less urgent) levels may use.

The setting `class_shares` has the limits.
Built by `scheduler`. `block_tables` reports the rows and blocks of requests, and `waiting_queue` lists only requests
that fit. Pure.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from conveyor_engine.scheduling.request_state import RequestState


class Limit(NamedTuple):
    """The limit for all requests of this level and of higher levels together."""

    level: int
    num_rows: int
    num_blocks: int


class Shares:
    """The limits, lowest level first, and how much of each is used. A limit applies to its level and higher levels."""

    def __init__(self, percents: Iterable[tuple[int, int]], num_rows: int, num_blocks: int) -> None:
        """percents: (level, percent) pairs. Each limit has at least one row."""
        self.limits = [
            Limit(level, max(1, num_rows * percent // 100), num_blocks * percent // 100)
            for level, percent in sorted(percents)
        ]
        self._levels = [limit.level for limit in self.limits]
        self.num_rows = [0] * len(self.limits)
        self.num_blocks = [0] * len(self.limits)

    def count_limits(self, level: int) -> int:
        """Return how many limits apply to a request of this level. These are the first ones in `limits`."""
        return bisect_right(self._levels, level)

    def hold(self, level: int, num_rows: int, num_blocks: int) -> None:
        """Add the rows and blocks that a request of this level newly uses. Negative numbers are freed.

        A shared block counts for each request that shares it.
        """
        for index in range(self.count_limits(level)):
            self.num_rows[index] += num_rows
            self.num_blocks[index] += num_blocks


NO_SHARES: Final = Shares((), 0, 0)


class Listing:
    """Finds the requests that fit in addition to the running ones, while candidates are listed in their order.

    The first request that does not fit closes the lowest limit that it exceeds, and all higher limits, for this
    listing. No later request under a closed limit is listed; requests of lower levels still may be.
    """

    def __init__(
        self,
        shares: Shares,
        num_blocks_of: Callable[[RequestState], int],
        takes: Callable[[int], bool] | None = None,
    ) -> None:
        """takes: whether a request with this adapter may be admitted; None: all may."""
        self._takes = takes
        self._shares = shares
        self._num_blocks_of = num_blocks_of
        self._num_rows = list(shares.num_rows)
        self._num_blocks = list(shares.num_blocks)
        self._num_open = len(shares.limits)  # this many of the first limits are open

    def is_open(self, num_limits: int) -> bool:
        """Return whether a request to which this number of limits applies may still fit."""
        return num_limits <= self._num_open

    def fits(self, request: RequestState) -> bool:
        """Count the request if it fits, and return whether it fits.

        While no running or counted request is under a limit, any request fits it, so that each level can run.
        """
        if self._takes is not None and not request.was_admitted and not self._takes(request.adapter):
            return False
        num_limits = self._shares.count_limits(request.level)
        if not self.is_open(num_limits):
            return False
        num_blocks = self._num_blocks_of(request) if num_limits else 0
        for index, limit in enumerate(self._shares.limits[:num_limits]):
            rows, blocks = self._num_rows[index] + 1, self._num_blocks[index] + num_blocks
            if rows > 1 and (rows > limit.num_rows or blocks > limit.num_blocks):
                self._num_open = index
                return False
        for index in range(num_limits):
            self._num_rows[index] += 1
            self._num_blocks[index] += num_blocks
        return True
