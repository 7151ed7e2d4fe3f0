"""Caches the newest known version of each resource, so that a reconcile needs no call to read one.

`watches` adds what the API server sends, and `reconcile` adds the results of its own writes. Tenants can write specs of
any number and size, so there are limits for an object, for a namespace and in total. Resources that do not fit are read
from the API server instead.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conveyor_operator.kinds import Key
from conveyor_operator.loop.owner import Object

OBJECT_BYTES: Final = 32 << 10  # compressed size, as for all limits here
NAMESPACE_BYTES: Final = 8 << 20
TOTAL_BYTES: Final = 48 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    key: Key
    version: int
    compressed: bytes


class Bodies:
    """Cached resources by uid, because for a moment there may be two objects with the same name."""

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self._most = total_bytes
        self._kept: dict[str, _Kept] = {}
        self._sizes: Counter[str] = Counter()
        """Compressed bytes of the cached resources, by namespace."""
        self._bytes = 0

    def put(self, key: Key, body: Mapping[str, Any], *, listed: bool = False) -> None:
        """Store the resource. Ignores a version older than the stored one, because a watch lags behind our writes.

        A `listed` resource replaces any version, because versions may be lower after etcd was restored.
        """
        metadata = {name: value for name, value in body["metadata"].items() if name != "managedFields"}
        uid, version = str(metadata["uid"]), _read_version(metadata.get("resourceVersion"))
        former = self._kept.get(uid)
        if former is not None and version < former.version and not listed:
            return
        self.drop(uid)
        compressed = zlib.compress(json.dumps({**body, "metadata": metadata}).encode(), 1)
        size = len(compressed)
        fits = self._sizes[key.namespace] + size <= NAMESPACE_BYTES and self._bytes + size <= self._most
        if size <= OBJECT_BYTES and fits:
            self._kept[uid] = _Kept(key, version, compressed)
            self._count(key, size)

    def get(self, uid: str) -> Object | None:
        """Return the resource; None if it is not cached."""
        kept = self._kept.get(uid)
        if kept is None:
            return None
        found: Object = json.loads(zlib.decompress(kept.compressed))
        return found

    def drop(self, uid: str) -> None:
        """Remove the resource, which no longer exists."""
        kept = self._kept.pop(uid, None)
        if kept is not None:
            self._count(kept.key, -len(kept.compressed))

    def _count(self, key: Key, size: int) -> None:
        self._bytes += size
        self._sizes[key.namespace] += size
        if not self._sizes[key.namespace]:
            del self._sizes[key.namespace]


def _read_version(version: Any) -> int:
    """Return the resourceVersion, a number that grows (KEP-5504). If it is no number, return 0: the last put wins."""
    return int(version) if isinstance(version, str) and version.isdigit() else 0
