"""Remembers the day of the last use of each APIKey, and why requests were rejected. The operator reads it (`/keys`).

`keys` notes uses, and whoever rejects a request notes the reason. An APIKey changes at most twice a day, and the
operator reads only changes, so that few writes reach the API server. Namespaces take turns in the order of changes, so
many keys of one namespace do not delay those of others.
"""

import secrets
import time
from bisect import bisect_left, insort
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, NamedTuple

from msgspec.structs import replace

from conveyor_gateway.caller import Caller
from conveyor_gateway.errors import Code
from conveyor_protocol.key_uses import MAX_CHANGES, KeyUse, KeyUses

_DAY_SECONDS: Final = 86_400
EXPIRED: Final = "Expired"
_REASONS: Final = {
    Code.RATE_LIMITED: "RateLimited",
    Code.SERVICE_NOT_FOUND: "NotFound",
    Code.MODEL_NOT_FOUND: "NotFound",
}


class _Change(NamedTuple):
    """A change in the order in which changes are reported. Each namespace has one change in a turn."""

    turn: int
    number: int
    key: str


class KeyLog:
    """The uses since this process started, by the APIKey's `namespace/name`."""

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self._now_unix = now_unix
        self._today = ""
        self._ends_unix = 0.0
        self._process = secrets.token_hex(8)
        self._num_changes = 0
        self._turn = 0  # the last one that a page has reported; new changes are behind all cursors
        self._last_turns: dict[str, int] = {}  # by namespace; those after `_turn`
        self._uses: dict[str, tuple[_Change, KeyUse]] = {}  # with the last change
        self._changes: list[_Change] = []  # the last ones of all keys, sorted

    def note_use(self, key: str, now_unix: float) -> None:
        """Note that a request has proved to have a key of this APIKey."""
        today, known = self._find_day(now_unix), self._uses.get(key)
        if known is None or known[1].used != today:
            self._change(key, replace(self._find(key), used=today))

    def note_rejected(self, key: str, reason: str) -> None:
        """Note that a request with a key of this APIKey was rejected. The first reason of a day counts."""
        today, use = self._find_day(self._now_unix()), self._find(key)
        if use.rejected != today:
            self._change(key, replace(use, rejected=today, reason=reason))

    def note_error(self, caller: Caller | None, code: Code) -> None:
        """Note an error that a caller gets, if it is one about its key, which may have been deleted meanwhile."""
        reason = _REASONS.get(code)
        if reason is not None and caller is not None and caller.name in self._uses:
            self.note_rejected(caller.name, reason)

    def forget(self, key: str) -> None:
        """Forget a deleted APIKey."""
        known = self._uses.pop(key, None)
        if known is not None:
            del self._changes[bisect_left(self._changes, known[0])]

    def build_page(self, cursor: str) -> KeyUses:
        """Return the changes after those of an earlier page with this cursor."""
        process, *place = cursor.split(":")
        is_known = process == self._process and len(place) == 2 and all(map(str.isdecimal, place))
        after = _Change(int(place[0]), int(place[1]) + 1, "") if is_known else _Change(0, 0, "")
        first = bisect_left(self._changes, after)
        page = self._changes[first : first + MAX_CHANGES]
        if not page:
            return KeyUses(cursor if is_known else f"{self._process}:0:0", [])
        last = page[-1]
        if last.turn > self._turn:
            self._turn = last.turn
            self._last_turns = {name: turn for name, turn in self._last_turns.items() if turn > self._turn}
        return KeyUses(f"{self._process}:{last.turn}:{last.number}", [self._uses[change.key][1] for change in page])

    def _find(self, key: str) -> KeyUse:
        found = self._uses.get(key)
        return KeyUse(*key.split("/")) if found is None else found[1]

    def _change(self, key: str, use: KeyUse) -> None:
        self.forget(key)
        self._num_changes += 1
        turn = self._last_turns[use.namespace] = 1 + max(self._turn, self._last_turns.get(use.namespace, 0))
        change = _Change(turn, self._num_changes, key)
        insort(self._changes, change)
        self._uses[key] = change, use

    def _find_day(self, now_unix: float) -> str:
        if now_unix >= self._ends_unix:
            self._ends_unix = now_unix - now_unix % _DAY_SECONDS + _DAY_SECONDS
            self._today = datetime.fromtimestamp(now_unix, UTC).date().isoformat()
        return self._today
