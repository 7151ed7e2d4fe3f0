"""Limits how many objects of a kind one namespace may have here, so that no tenant fills the memory of all.

Used by `table`.
"""

from collections import Counter


class NamespaceLimit:
    """Counts what is kept for each namespace, `most` at most."""

    def __init__(self, kind: str, most: int) -> None:
        self._kind = kind
        self._most = most
        self._kept: Counter[str] = Counter()

    def change(self, key: str, before: int, after: int) -> None:
        """What is kept for the object `namespace/name` changes. Raises ValueError, and does nothing, if it may not."""
        namespace = key.partition("/")[0]
        kept = self._kept[namespace] + after - before
        if after > before and kept > self._most:
            raise ValueError(f"its namespace has more than {self._most} {self._kind}")
        self._kept[namespace] = kept
        if not kept:
            del self._kept[namespace]
