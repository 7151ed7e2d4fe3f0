"""Slots for reconciles. Namespaces get them in turn, and none gets more than its share.

`workers` takes one for each reconcile. A namespace whose resources are many, or slow to write, delays its own.
"""

import asyncio
from collections import Counter, deque


class Slots:
    """`acquire` waits for one of `limit` slots, of which a namespace has `share` at most, and `release` gives it back.

    Within a namespace they come in the order of asking.
    """

    def __init__(self, limit: int, share: int) -> None:
        self._free = limit
        self._share = share
        self._held: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._turns: dict[str, None] = {}
        """Namespaces that wait and hold less than their share, in the order of their turns."""

    async def acquire(self, namespace: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        self._line_up(namespace)
        self._hand_out()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot came before the cancellation
                self.release(namespace)
            raise

    def release(self, namespace: str) -> None:
        self._free += 1
        self._held[namespace] -= 1
        if not self._held[namespace]:
            del self._held[namespace]
        self._line_up(namespace)
        self._hand_out()

    def _line_up(self, namespace: str) -> None:
        if namespace in self._waiting and self._held[namespace] < self._share:
            self._turns.setdefault(namespace)

    def _hand_out(self) -> None:
        while self._free and self._turns:
            namespace = next(iter(self._turns))
            del self._turns[namespace]
            turn = self._next_of(namespace)
            if not turn.cancelled():
                self._free -= 1
                self._held[namespace] += 1
                turn.set_result(None)
            self._line_up(namespace)  # behind all others

    def _next_of(self, namespace: str) -> asyncio.Future[None]:
        turns = self._waiting[namespace]
        turn = turns.popleft()
        if not turns:
            del self._waiting[namespace]
        return turn
