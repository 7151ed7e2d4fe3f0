"""Who may reconcile next: slots up to a limit, given to the namespaces that wait for one in turn.

`workers` takes one for each reconcile. A namespace whose resources are many, or slow to write, delays its own.
"""

import asyncio
from collections import deque


class Slots:
    """`acquire` waits for a slot, `release` gives it to the next namespace; within one in the order of asking."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """By namespace, in the order of their turns; none is empty."""

    async def acquire(self, namespace: str) -> None:
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the slot came before the cancellation
                self.release()
            raise

    def release(self) -> None:
        while self._waiting:
            namespace = next(iter(self._waiting))
            turns = self._waiting.pop(namespace)
            turn = turns.popleft()
            if turns:
                self._waiting[namespace] = turns  # behind all others
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
