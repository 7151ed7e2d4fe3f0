"""How much of the batch high levels may hold: rows and KV blocks, by the setting `class_shares`.

Made by `scheduler`. `block_tables` reports what requests hold; `waiting_queue` lists only requests that fit. Pure.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from conveyor_engine.scheduling.request_state import RequestState


class Limit(NamedTuple):
    """What requests of this level and of higher ones may hold together."""

    level: int
    num_rows: int
    num_blocks: int


class Shares:
    """The limits, lowest level first, and what is held of each. A request has all limits up to its level."""

    def __init__(self, percents: Iterable[tuple[int, int]], num_rows: int, num_blocks: int) -> None:
        """`percents` are (level, per cent). Of rows, each limit has at least one."""
        self.limits = [
            Limit(level, max(1, num_rows * percent // 100), num_blocks * percent // 100)
            for level, percent in sorted(percents)
        ]
        self._levels = [limit.level for limit in self.limits]
        self.num_rows = [0] * len(self.limits)
        self.num_blocks = [0] * len(self.limits)

    def count_limits(self, level: int) -> int:
        """How many limits a request of this level has: the first ones."""
        return bisect_right(self._levels, level)

    def hold(self, level: int, num_rows: int, num_blocks: int) -> None:
        """A request of this level holds so much more, or less. A block counts for each request that shares it."""
        for index in range(self.count_limits(level)):
            self.num_rows[index] += num_rows
            self.num_blocks[index] += num_blocks


NO_SHARES: Final = Shares((), 0, 0)


class Listing:
    """Which requests fit beside those that run, while candidates are listed in their order.

    The first request that does not fit closes its limit for the listing, so no later one overtakes it.
    """

    def __init__(self, shares: Shares, num_blocks_of: Callable[[RequestState], int]) -> None:
        self._shares = shares
        self._num_blocks_of = num_blocks_of
        self._num_rows = list(shares.num_rows)
        self._num_blocks = list(shares.num_blocks)
        self._num_open = len(shares.limits)  # limits: the first ones

    def is_open(self, num_limits: int) -> bool:
        """Whether a request that has so many limits may still fit."""
        return num_limits <= self._num_open

    def fits(self, request: RequestState) -> bool:
        """Counts the request if it fits. Where nothing is held of a limit, any request does, so that each can run."""
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
