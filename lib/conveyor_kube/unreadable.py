"""Logs, counts and skips objects of the cluster that cannot be parsed. Each is logged once.

Used by the gateway, the metrics server and the operator around parsers of watched objects.
"""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from conveyor_api.errors import InvalidResource
from conveyor_kube.wanted_json import Json, keys_within

logger = logging.getLogger(__name__)

# Errors that parsing an object with any content may raise.
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
_MAX_COUNTED: Final = 10_000  # beyond this number, no further object is logged or counted

_Parsed = TypeVar("_Parsed")


class Unreadable:
    """The unreadable objects of one collection; the log names their `kind` and the `consequence`."""

    def __init__(self, kind: str, consequence: str = "its last readable state is used") -> None:
        self._kind = kind
        self._consequence = consequence
        self._keys: set[str] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def parse(self, key: str, parse: Callable[[Json], _Parsed], body: Json) -> _Parsed | None:
        """Return the result of `parse`, or None if it fails."""
        try:
            parsed = parse(body)
        except _UNREADABLE as error:
            if key not in self._keys and len(self._keys) < _MAX_COUNTED:
                reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
                logger.warning(
                    "event=object_unreadable kind=%s key=%s consequence=%s error=%s",
                    self._kind,
                    key,
                    self._consequence,
                    reason,
                )
                self._keys.add(key)
            return None
        self._keys.discard(key)
        return parsed

    def forget(self, key: str) -> None:
        """Drop an object that no longer exists."""
        self._keys.discard(key)

    def forget_others(self, keys: set[str], namespace: str) -> None:
        """Drop all objects in `namespace` ("" for all namespaces) except those with these keys."""
        self._keys -= keys_within(namespace, self._keys) - keys
