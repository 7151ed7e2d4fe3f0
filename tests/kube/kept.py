"""A sink that keeps the bodies that a watch passes to it. Tests can wait for an expected content."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

Json = dict[str, Any]


class Kept:
    """The bodies of one namespace, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}

    def put(self, body: Json) -> str:
        name: str = body["metadata"]["name"]
        self.objects[name] = body
        return name

    def delete(self, body: Json) -> None:
        self.objects.pop(body["metadata"]["name"], None)

    def keep_only(self, keys: set[str], namespace: str) -> Iterable[None]:
        self.objects = {name: body for name, body in self.objects.items() if name in keys}
        return ()


async def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancel the tasks. Raises the error of a task that has ended by itself."""
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task
