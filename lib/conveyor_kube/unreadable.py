"""Logs, counts and skips objects of the cluster that cannot be parsed. Each is logged once, and a few of a namespace.

A tenant can create any number of such objects, for example more APIKeys than a gateway uses. Used by the gateway, the
metrics server and the operator around parsers of watched objects.
"""

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from conveyor_api.errors import InvalidResource
from conveyor_kube.wanted_json import Json

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
_MAX_LOGGED: Final = 10  # unreadable objects of one namespace at a time; later ones are only counted
_MAX_COUNTED: Final = 1_000  # of one namespace

_Parsed = TypeVar("_Parsed")


class Unreadable:
    """The unreadable objects of one collection; the log names their `kind` and the `consequence`."""

    def __init__(self, kind: str, consequence: str = "its last readable state is used") -> None:
        self._kind = kind
        self._consequence = consequence
        self._keys: dict[str, set[str]] = {}  # by namespace

    def __len__(self) -> int:
        """Number of unreadable objects, of which at most _MAX_COUNTED of each namespace count."""
        return sum(map(len, self._keys.values()))

    def parse(self, key: str, parse: Callable[[Json], _Parsed], body: Json) -> _Parsed | None:
        """Return the result of `parse`, or None if it fails."""
        try:
            parsed = parse(body)
        except _UNREADABLE as error:
            self._note(key, error)
            return None
        self.forget(key)
        return parsed

    def _note(self, key: str, error: Exception) -> None:
        namespace = _find_namespace(key)
        keys = self._keys.setdefault(namespace, set())
        if key in keys or len(keys) >= _MAX_COUNTED:
            return
        keys.add(key)
        if len(keys) <= _MAX_LOGGED:
            reason = f"{type(error).__name__}: {error}"[:_REASON_CHARACTERS]
            logger.warning(
                "event=object_unreadable kind=%s key=%s consequence=%s error=%s",
                self._kind,
                key,
                self._consequence,
                reason,
            )
        elif len(keys) == _MAX_LOGGED + 1:
            logger.warning(
                "event=objects_unreadable kind=%s namespace=%s logged=%d consequence=%s",
                self._kind,
                namespace,
                _MAX_LOGGED,
                "more are counted and not logged",
            )

    def forget(self, key: str) -> None:
        """Drop an object that no longer exists, or that can be read again."""
        namespace = _find_namespace(key)
        keys = self._keys.get(namespace)
        if keys is None:
            return
        keys.discard(key)
        if not keys:
            del self._keys[namespace]

    def forget_others(self, keys: set[str], namespace: str) -> None:
        """Drop all objects in `namespace` ("" for all namespaces) except those with these keys."""
        for each in [namespace] if namespace else list(self._keys):
            for key in self._keys.get(each, set()) - keys:
                self.forget(key)


def _find_namespace(key: str) -> str:
    """Return the namespace in `namespace/name`; the name of an object without a namespace."""
    return key.partition("/")[0]
