"""Shares the turns of the event loop: only a few requests begin in each, in rotation between namespaces.

A request costs little of the loop (ADR 125), but a tenant may send any number of requests, and the loop would handle
all that have arrived before it looks at anybody else's. Requests that wait here are answered later, so a client that
waits for its answer sends its next request later too.
"""

import asyncio
import time
from collections import deque
from typing import Final

MOST: Final = 8  # requests that begin in one turn
_LONG_SECONDS: Final = 0.01  # after a longer turn, one request begins in the next


class Turns:
    """The requests that wait for a turn. Must be used by one event loop only."""

    def __init__(self) -> None:
        self._num_begun = 0  # in this turn
        self._began = 0.0  # this turn
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by owner; the one that is next comes first

    async def wait(self, owner: str) -> None:
        """Return in the turn in which a request of `owner` may begin. owner: a namespace, or a client without one."""
        loop = asyncio.get_running_loop()
        if self._num_begun < MOST and not self._waiting:
            if not self._num_begun:
                self._began = time.monotonic()
                loop.call_soon(self._begin_turn)
            self._num_begun += 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _begin_turn(self) -> None:
        """Let the first requests of the next owners begin, and look again in the next turn."""
        now = time.monotonic()
        most = MOST if now - self._began < _LONG_SECONDS else 1
        self._num_begun, self._began = 0, now
        while self._waiting and self._num_begun < most:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # after all others
            if not turn.done():  # otherwise the request was cancelled
                turn.set_result(None)
                self._num_begun += 1
        if self._num_begun:
            asyncio.get_running_loop().call_soon(self._begin_turn)
