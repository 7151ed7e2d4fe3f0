"""A sink of a watch that passes the list of all objects to a callback after every change."""

from collections.abc import Callable, Iterable

from conveyor_kube.wanted_json import Json


class WatchedList:
    """Calls `on_change` with all objects after the first list and after every change."""

    def __init__(self, on_change: Callable[[list[Json]], None]) -> None:
        self._on_change = on_change
        self._objects: dict[str, Json] = {}
        self._is_listed = False

    def put(self, body: Json) -> str:
        name: str = body["metadata"]["name"]
        self._objects[name] = body
        self._notify()
        return name

    def delete(self, body: Json) -> None:
        self._objects.pop(body["metadata"]["name"], None)
        self._notify()

    def keep_only(self, keys: set[str], namespace: str) -> Iterable[None]:
        self._objects = {name: body for name, body in self._objects.items() if name in keys}
        self._is_listed = True
        self._notify()
        return ()

    def _notify(self) -> None:
        if self._is_listed:  # not while the list is incomplete
            self._on_change(list(self._objects.values()))
