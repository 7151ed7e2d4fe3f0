"""The objects of one collection as a list, for those who want all of them after every change. A sink of a watch."""

from collections.abc import Callable, Iterable
from typing import Any

Json = dict[str, Any]


class WatchedList:
    """Calls `on_change` with all objects after the first list and after every change."""

    def __init__(self, on_change: Callable[[list[Json]], None]) -> None:
        self._on_change = on_change
        self._objects: dict[str, Json] = {}

    def replace(self, bodies: Iterable[Json], namespace: str) -> None:
        self._objects = {body["metadata"]["name"]: body for body in bodies}
        self._on_change(list(self._objects.values()))

    def put(self, body: Json) -> None:
        self._objects[body["metadata"]["name"]] = body
        self._on_change(list(self._objects.values()))

    def delete(self, body: Json) -> None:
        self._objects.pop(body["metadata"]["name"], None)
        self._on_change(list(self._objects.values()))
