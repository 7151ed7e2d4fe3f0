"""The resources as they were told last, so that a reconcile needs no call to read one.

`watches` puts in what the API server tells, `reconcile` what its own writes return. A tenant writes specs of any number
and size, so an object, a namespace and all together have bounds; what does not fit is read from the API server instead.
"""

import json
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from conveyor_operator.kinds import Key
from conveyor_operator.loop.owner import Object

OBJECT_BYTES: Final = 32 << 10  # compressed, as all bounds here
NAMESPACE_BYTES: Final = 8 << 20
TOTAL_BYTES: Final = 48 << 20


@dataclass(frozen=True, slots=True)
class _Kept:
    key: Key
    version: int
    compressed: bytes


class Bodies:
    """By uid: for a moment there may be two objects of one name."""

    def __init__(self, total_bytes: int = TOTAL_BYTES) -> None:
        self._most = total_bytes
        self._kept: dict[str, _Kept] = {}
        self._sizes: Counter[str] = Counter()
        """Bytes by namespace."""
        self._bytes = 0

    def put(self, key: Key, body: Mapping[str, Any], *, listed: bool = False) -> None:
        """The resource is like this. An older version than the kept one is ignored: a watch lags behind our writes.
        What is `listed` counts whatever its version: where etcd was restored, versions begin anew."""
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
        """The resource; None if it is not kept."""
        kept = self._kept.get(uid)
        if kept is None:
            return None
        found: Object = json.loads(zlib.decompress(kept.compressed))
        return found

    def drop(self, uid: str) -> None:
        """The resource is gone."""
        kept = self._kept.pop(uid, None)
        if kept is not None:
            self._count(kept.key, -len(kept.compressed))

    def _count(self, key: Key, size: int) -> None:
        self._bytes += size
        self._sizes[key.namespace] += size
        if not self._sizes[key.namespace]:
            del self._sizes[key.namespace]


def _read_version(told: Any) -> int:
    """A resourceVersion is a number that grows (KEP-5504). Of another form, the newest told counts."""
    return int(told) if isinstance(told, str) and told.isdigit() else 0
