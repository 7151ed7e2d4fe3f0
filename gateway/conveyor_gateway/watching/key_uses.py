"""Remembers the day of the last use of each APIKey, and why requests were rejected. The operator reads it (`/keys`).

`keys` notes uses, and whoever rejects a request notes the reason. An APIKey changes at most twice a day, and the
operator reads only changes, so that few writes reach the API server.
"""

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

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


class KeyLog:
    """The uses since this process started, by the APIKey's `namespace/name`, the last change last."""

    def __init__(self, now_unix: Callable[[], float] = time.time) -> None:
        self._now_unix = now_unix
        self._today = ""
        self._ends_unix = 0.0
        self._process = secrets.token_hex(8)
        self._num_changes = 0
        self._uses: dict[str, tuple[int, KeyUse]] = {}  # with the number of the last change

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
        self._uses.pop(key, None)

    def build_page(self, cursor: str) -> KeyUses:
        """Return the changes after those of an earlier page with this cursor."""
        process, _, number = cursor.partition(":")
        after = int(number) if process == self._process and number.isdecimal() else 0
        changes: list[tuple[int, KeyUse]] = []
        for change in reversed(self._uses.values()):
            if change[0] <= after:
                break
            changes.append(change)
        page = changes[: -MAX_CHANGES - 1 : -1]
        last = page[-1][0] if page else after
        return KeyUses(f"{self._process}:{last}", [use for _, use in page])

    def _find(self, key: str) -> KeyUse:
        found = self._uses.get(key)
        return KeyUse(*key.split("/")) if found is None else found[1]

    def _change(self, key: str, use: KeyUse) -> None:
        self._num_changes += 1
        self._uses.pop(key, None)
        self._uses[key] = self._num_changes, use

    def _find_day(self, now_unix: float) -> str:
        if now_unix >= self._ends_unix:
            self._ends_unix = now_unix - now_unix % _DAY_SECONDS + _DAY_SECONDS
            self._today = datetime.fromtimestamp(now_unix, UTC).date().isoformat()
        return self._today
