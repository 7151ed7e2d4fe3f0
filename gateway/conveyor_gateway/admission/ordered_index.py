"""An index of items in order, which skips those that the wanted engines cannot serve. Used by `waiting` only. Pure.

It is a treap (Seidel and Aragon, "Randomized search trees", 1996). Each node also stores the engines that all items of
its subtree exclude, and those that are the home of any of them. A search skips a subtree that none of the wanted
engines can serve. So each operation costs O(log n) for n items, whichever engines they exclude.
"""

import random
from collections.abc import Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")
Key = tuple[float, int]

_NOBODY: Final = -1  # a mask with all bits: an empty subtree excludes every engine


class _Node(Generic[T]):
    __slots__ = ("above", "below", "excluded", "excluded_by_all", "home", "homes", "item", "key", "weight")

    def __init__(self, key: Key, item: T, excluded: int, home: int) -> None:
        self.key = key
        self.item = item
        self.excluded = self.excluded_by_all = excluded
        self.home = self.homes = home
        self.weight = random.random()
        self.below: _Node[T] | None = None  # items that come before this one
        self.above: _Node[T] | None = None

    def update(self) -> "_Node[T]":
        self.excluded_by_all = self.excluded & _excluded_by_all(self.below) & _excluded_by_all(self.above)
        self.homes = self.home | _homes(self.below) | _homes(self.above)
        return self


class OrderedIndex(Generic[T]):
    """Items by their keys, the lowest key first. Two items never have the same key.

    excluded: the engines that cannot serve an item, as a mask. home: those where it finds its prefix.
    """

    __slots__ = ("_root", "size")

    def __init__(self) -> None:
        self._root: _Node[T] | None = None
        self.size = 0

    def __iter__(self) -> Iterator[T]:
        path, node = list[_Node[T]](), self._root
        while path or node is not None:
            while node is not None:
                path.append(node)
                node = node.below
            node = path.pop()
            yield node.item
            node = node.above

    @property
    def excluded_by_all(self) -> int:
        return _excluded_by_all(self._root)

    @property
    def homes(self) -> int:
        return _homes(self._root)

    def add(self, key: Key, item: T, excluded: int, home: int) -> None:
        node = _Node(key, item, excluded, home)
        if self._root is None:
            self._root = node
        else:
            below, above = _split(self._root, key)
            self._root = _join(_join(below, node), above)
        self.size += 1

    def remove(self, key: Key) -> None:
        """Remove the item with this key. Raises KeyError without one."""
        self._root = _remove(self._root, key)
        self.size -= 1

    def first(self, wanted: int, after: Key | None = None) -> T | None:
        """Return the first item, after this key, that one of the engines `wanted` can serve."""
        found = _find_first(self._root, wanted, after)
        return None if found is None else found.item

    def first_at_home(self, wanted: int) -> T | None:
        """Return the first item that has its home among the engines `wanted`."""
        node = self._root
        while node is not None and wanted & node.homes:
            if wanted & _homes(node.below):
                node = node.below
            elif wanted & node.home:
                return node.item
            else:
                node = node.above
        return None

    def last(self) -> T:
        """Return the last item. The index must not be empty."""
        node = self._root
        assert node is not None, "the caller has checked the size"
        while node.above is not None:
            node = node.above
        return node.item


def _excluded_by_all(node: _Node[T] | None) -> int:
    return _NOBODY if node is None else node.excluded_by_all


def _homes(node: _Node[T] | None) -> int:
    return 0 if node is None else node.homes


def _find_first(node: _Node[T] | None, wanted: int, after: Key | None) -> _Node[T] | None:
    while node is not None and wanted & ~node.excluded_by_all:
        if after is None or after < node.key:
            if (found := _find_first(node.below, wanted, after)) is not None:
                return found
            if wanted & ~node.excluded:
                return node
        node = node.above
    return None


def _join(below: _Node[T] | None, above: _Node[T] | None) -> _Node[T] | None:
    """Join two trees into one. All keys of `below` are lower than those of `above`."""
    if below is None or above is None:
        return below or above
    if below.weight > above.weight:
        below.above = _join(below.above, above)
        return below.update()
    above.below = _join(below, above.below)
    return above.update()


def _split(node: _Node[T] | None, key: Key) -> tuple[_Node[T] | None, _Node[T] | None]:
    """Split a tree into the tree of lower keys and the tree of keys from `key` on."""
    if node is None:
        return None, None
    if node.key < key:
        node.above, above = _split(node.above, key)
        return node.update(), above
    below, node.below = _split(node.below, key)
    return below, node.update()


def _remove(node: _Node[T] | None, key: Key) -> _Node[T] | None:
    if node is None:
        raise KeyError(key)
    if node.key == key:
        return _join(node.below, node.above)
    if key < node.key:
        node.below = _remove(node.below, key)
    else:
        node.above = _remove(node.above, key)
    return node.update()
