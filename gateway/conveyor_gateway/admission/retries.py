"""Limits how often rejected requests are sent again: a budget for each service, and a pause for each request.

Used by `dispatcher` only. Pure bookkeeping: the caller passes the time.
"""

import heapq
from typing import Final

from conveyor_gateway.admission.ticket import Ticket

RETRIES_PER_SECOND: Final = 32.0
RETRIES_FOR_AN_ANSWER: Final = 2.0
MAX_RETRIES_AT_ONCE: Final = 128.0


class RetryBudget:
    """A token bucket. Time and answers of engines fill it. Each retry spends one token.

    Without it, engines that reject everything would keep the event loop of all services busy.
    """

    def __init__(self, now_seconds: float) -> None:
        self._left = MAX_RETRIES_AT_ONCE
        self._refilled_at = now_seconds

    def has_one(self, now_seconds: float) -> bool:
        self._refill(now_seconds)
        return self._left >= 1.0

    def spend(self, now_seconds: float) -> None:
        self._refill(now_seconds)
        self._left = max(0.0, self._left - 1.0)

    def add_answer(self) -> None:
        self._left = min(MAX_RETRIES_AT_ONCE, self._left + RETRIES_FOR_AN_ANSWER)

    def next_at(self, now_seconds: float) -> float:
        """Return the time at which the next token is available."""
        self._refill(now_seconds)
        return now_seconds + max(0.0, 1.0 - self._left) / RETRIES_PER_SECOND

    def _refill(self, now_seconds: float) -> None:
        earned = (now_seconds - self._refilled_at) * RETRIES_PER_SECOND
        self._left = min(MAX_RETRIES_AT_ONCE, self._left + earned)
        self._refilled_at = now_seconds


class Exclusions:
    """Waiting requests for which some engines had no room, ordered by the end of their pauses.

    A request is not sent to these engines again during its pause.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Ticket]] = []

    def add(self, ticket: Ticket) -> None:
        heapq.heappush(self._heap, (ticket.full_until, ticket.number, ticket))

    def pop_ended(self, now_seconds: float) -> Ticket | None:
        """Remove and return a ticket whose exclusions have ended; None without one.

        The ticket may already have left the queue.
        """
        if self._heap and self._heap[0][0] <= now_seconds:
            return heapq.heappop(self._heap)[2]
        return None

    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None
