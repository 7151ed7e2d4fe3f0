"""Remembers the requests that engines had when they died, so that one request does not end one engine after another.

A request may be the cause of its engine's death, or just have been there. So a request is sent to one more engine.
An exception is a request whose answer has a form (a schema, a grammar, tools), because the engine executes what its
client wrote. If such a body was at two dying engines within a minute, it is refused, also if the client sends it again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

DEATHS_MAX: Final = 2
REMEMBERED_SECONDS: Final = 60.0
_REMEMBERED_MAX: Final = 4096  # bodies
_HASHED_BYTES: Final = 64 * 1024  # at each end of a body
_FORMS: Final = (
    b"_format", b"structured_outputs", b"guided_", b"tool", b"regex", b"ebnf", b"grammar", b"schema",
    b"\\u00",  # an escaped letter, with which a name can be written in another way
)  # fmt: skip


def has_form(body: bytes) -> bool:
    """Return whether the answer may have to follow a form. False only if it does not."""
    return any(name in body for name in _FORMS)


class Deaths:
    """The bodies that were at engines which died, with the number of these engines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[bytes, tuple[float, int]] = OrderedDict()  # the oldest first

    def note(self, body: bytes) -> None:
        """Record that an engine died with this body, which has a form."""
        key, now = _key(body), self._clock()
        _, number = self._noted.pop(key, (now, 0))
        self._noted[key] = now, number + 1
        self._forget(now)

    def is_refused(self, body: bytes) -> bool:
        """Return whether too many engines died with this body."""
        if not self._noted:
            return False
        self._forget(self._clock())
        return self._noted.get(_key(body), (0.0, 0))[1] >= DEATHS_MAX

    def _forget(self, now: float) -> None:
        while self._noted:
            key, (noted_at, _) = next(iter(self._noted.items()))
            if len(self._noted) <= _REMEMBERED_MAX and now - noted_at < REMEMBERED_SECONDS:
                return
            del self._noted[key]


def _key(body: bytes) -> bytes:
    size = len(body).to_bytes(8, "big")
    return blake2b(size + body[:_HASHED_BYTES] + body[-_HASHED_BYTES:], digest_size=16).digest()
