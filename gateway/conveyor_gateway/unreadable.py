"""Objects of the cluster that cannot be read: told once each, counted, and without harm to any other.

Used by `catalog` and by the metrics server's `source` around every parser of an object.
"""

import logging
from collections.abc import Callable, Collection
from typing import Final, TypeVar

from conveyor_api.errors import InvalidResource
from conveyor_gateway.wanted_json import Json

logger = logging.getLogger(__name__)

# What parsing an object of any content may raise.
_UNREADABLE: Final = (
    InvalidResource,
    LookupError,
    TypeError,
    ValueError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
_REASON_CHARACTERS: Final = 300

_Parsed = TypeVar("_Parsed")


class Unreadable:
    """Those of one collection; the log calls one of them `kind`, and says what follows."""

    def __init__(self, kind: str, consequence: str = "its last readable state is used") -> None:
        self._kind = kind
        self._consequence = consequence
        self._keys: set[str] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def parse(self, key: str, parse: Callable[[Json], _Parsed], body: Json) -> _Parsed | None:
        """What `parse` makes of the object, or None."""
        try:
            parsed = parse(body)
        except _UNREADABLE as error:
            if key not in self._keys:
                reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
                logger.warning("%s=%s cannot be read, %s: %s", self._kind, key, self._consequence, reason)
            self._keys.add(key)
            return None
        self._keys.discard(key)
        return parsed

    def forget(self, key: str) -> None:
        """The object is gone."""
        self._keys.discard(key)

    def forget_others(self, keys: Collection[str], namespace: str) -> None:
        """`keys` are all there are in `namespace` (empty: in all of them)."""
        prefix = f"{namespace}/" if namespace else ""
        self._keys = {key for key in self._keys if key in keys or not key.startswith(prefix)}
