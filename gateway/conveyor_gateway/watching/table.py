"""A sink of `watch` that keeps the parsed objects of one kind.

The sum of the objects' weights is limited for each namespace, so that no tenant can fill the gateway's memory. If an
object cannot be parsed, or exceeds its namespace's limit, its last valid version stays, except for `drops_unreadable`.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Generic, TypeVar

from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Json, find_key, keys_within

_Item = TypeVar("_Item")


class Table(ABC, Generic[_Item]):
    """One item for each object. Subclasses parse, weigh and store the items."""

    drops_unreadable: ClassVar[bool] = False  # whether an object that cannot be parsed loses its last valid version

    def __init__(self, items: Mapping[str, _Item], unreadable: Unreadable, kind: str, most: int) -> None:
        """items: the stored items by `namespace/name`. most: limit of the items' weights in one namespace."""
        self._items = items
        self.unreadable = unreadable
        self._kind = kind
        self._most = most
        self._weights: Counter[str] = Counter()  # by namespace
        self._subscribers: list[Callable[[str], None]] = []

    def subscribe(self, on_change: Callable[[str], None]) -> None:
        """Call `on_change` after each later change with the service's `namespace/name`.

        The table of APIKeys calls it with the name of each APIKey that is gone.
        """
        self._subscribers.append(on_change)

    def _notify(self, service: str) -> None:
        for on_change in self._subscribers:
            on_change(service)

    @abstractmethod
    def _parse(self, body: Json) -> _Item:
        """Parse the part of an object that is kept. Raises an error if it cannot be parsed."""

    @abstractmethod
    def _weigh(self, item: _Item) -> int:
        """Return how much of the namespace's limit the item uses, at least 1."""

    @abstractmethod
    def _keep(self, key: str, item: _Item) -> None:
        """Store the object's item, which differs from the stored one."""

    @abstractmethod
    def _drop(self, key: str) -> None:
        """Remove a stored item."""

    def put(self, body: Json) -> str:
        """Store a new or changed object. Return its key."""
        key = find_key(body)
        item = self.unreadable.parse(key, self._parse_within_limit, body)
        if item is None:
            if self.drops_unreadable:
                self._remove(key)
        elif item != self._items.get(key):
            self._keep(key, item)
        return key

    def delete(self, body: Json) -> None:
        key = find_key(body)
        self.unreadable.forget(key)
        self._remove(key)

    def keep_only(self, keys: set[str], namespace: str) -> Iterator[None]:
        """Remove all objects in `namespace` (empty: in all namespaces) except those with these keys, one at a time."""
        self.unreadable.forget_others(keys, namespace)
        for key in keys_within(namespace, self._items) - keys:
            self._remove(key)
            yield

    def _parse_within_limit(self, body: Json) -> _Item:
        key = find_key(body)
        if key not in self._items and self._weights[key.partition("/")[0]] >= self._most:
            raise self._build_full()  # a namespace with any number of objects costs no parsing of all of them
        item = self._parse(body)
        self._change_weight(key, self._weigh(item))
        return item

    def _build_full(self) -> ValueError:
        return ValueError(f"its namespace has more than {self._most} {self._kind}")

    def _remove(self, key: str) -> None:
        if key in self._items:
            self._change_weight(key, 0)
            self._drop(key)

    def _change_weight(self, key: str, weight: int) -> None:
        """Set the object's weight. Raises ValueError, and changes nothing, if the namespace would exceed its limit."""
        known, namespace = self._items.get(key), key.partition("/")[0]
        before = 0 if known is None else self._weigh(known)
        total = self._weights[namespace] + weight - before
        if weight > before and total > self._most:
            raise self._build_full()
        self._weights[namespace] = total
        if not total:
            del self._weights[namespace]
