"""Remembers the requests that engines had when they died, so that one request does not end one engine after another.

A request may be the cause of its engine's death, or just have been there. So a request is sent to one more engine.
An exception is a request whose answer has a form (a schema, a grammar, tools), because the engine executes what its
client wrote. If such a body was at two dying engines within a minute, it is refused, also if the client sends it again.
"""

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple

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


class _Noted(NamedTuple):
    """The deaths of engines with one body: when the last one was noted, how many, and the last engine's address."""

    at: float
    number: int
    address: str


_NEVER: Final = _Noted(0.0, 0, "")


class Deaths:
    """The bodies that were at engines which died, with the number of these engines. Times are those of `clock`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._noted: OrderedDict[bytes, _Noted] = OrderedDict()  # the oldest first

    def note(self, body: bytes, address: str, sent_at: float, is_silent: bool) -> None:
        """Record that the engine at `address` died with this body, which has a form and was sent at `sent_at`.

        If the engine had the same body several times when it died, that is one death. `is_silent`: its node stopped
        acknowledging. Connections to this node may time out one after another, so that is one death, too.
        """
        key, now = _key(body), self._clock()
        noted = self._noted.get(key, _NEVER)
        if noted.address == address and (is_silent or sent_at <= noted.at):
            return
        self._noted.pop(key, None)
        self._noted[key] = _Noted(now, noted.number + 1, address)
        self._forget(now)

    def is_refused(self, body: bytes) -> bool:
        """Return whether too many engines died with this body."""
        if not self._noted:
            return False
        self._forget(self._clock())
        return self._noted.get(_key(body), _NEVER).number >= DEATHS_MAX

    def _forget(self, now: float) -> None:
        while self._noted:
            key, noted = next(iter(self._noted.items()))
            if len(self._noted) <= _REMEMBERED_MAX and now - noted.at < REMEMBERED_SECONDS:
                return
            del self._noted[key]


def _key(body: bytes) -> bytes:
    size = len(body).to_bytes(8, "big")
    return blake2b(size + body[:_HASHED_BYTES] + body[-_HASHED_BYTES:], digest_size=16).digest()
