"""Keeps what was read for some seconds. Those who want the same at the same time share one read."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Shared(Generic[Key, Value]):
    """Results by key. seconds: how long one is kept, from the time when its read began. most: how many are kept."""

    def __init__(self, seconds: float, most: int) -> None:
        self._seconds = seconds
        self._most = most
        self._reads: OrderedDict[Key, tuple[float, asyncio.Future[Value]]] = OrderedDict()  # the oldest first

    async def get(self, key: Key, read: Callable[[], Awaitable[Value]]) -> Value:
        """Return the kept result or that of `read`. Raises what `read` raises, which is not kept."""
        now, kept = time.monotonic(), self._reads.get(key)
        if kept is None or now - kept[0] >= self._seconds:
            begun = asyncio.ensure_future(read())
            begun.add_done_callback(lambda done: self._drop_failed(key, done))
            kept = self._reads[key] = now, begun
            self._reads.move_to_end(key)
            if len(self._reads) > self._most:
                self._reads.popitem(last=False)
        result = kept[1]
        return result.result() if result.done() else await asyncio.shield(result)

    def _drop_failed(self, key: Key, done: asyncio.Future[Value]) -> None:
        has_failed = done.cancelled() or done.exception() is not None
        if has_failed and key in self._reads and self._reads[key][1] is done:
            del self._reads[key]
