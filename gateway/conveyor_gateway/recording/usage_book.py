"""Counts what callers use, by day, service and class. Filled by `record`; the operator reads it (`/usage`).

The operator adds up the counts of all gateways, and keeps them for a month. `kubectl conveyor usage` prints them.
"""

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from conveyor_protocol.pages import Usage, UsageRow
from conveyor_protocol.usage import UsedTokens

MAX_ROWS: Final = 300  # of a day; further callers of a service are counted together
OTHER_CALLERS: Final = "*"  # no caller has this name
_DAYS: Final = 2
_DAY_SECONDS: Final = 86_400

_Key = tuple[str, str, str]


class UsageBook:
    """The counts of this process, for today and yesterday in UTC. A request counts on the day of its end."""

    def __init__(self, unix: Callable[[], float] = time.time) -> None:
        self._unix = unix
        self._process = secrets.token_hex(8)
        self._days: dict[str, dict[_Key, list[float]]] = {}
        self._today: dict[_Key, list[float]] = {}
        self._ends_unix = 0.0

    def count(self, service: str, caller: str, request_class: str, usage: UsedTokens | None) -> None:
        """Count a request that an engine has processed. caller: "" for a client without a name."""
        if self._unix() >= self._ends_unix:
            self._begin_day()
        row = self._today.get((service, caller, request_class))
        if row is None:
            row = self._add(service, caller, request_class)
        row[0] += 1
        if usage is not None:
            row[1] += usage.prompt_tokens
            row[2] += usage.cached_tokens
            row[3] += usage.completion_tokens
            row[4] += 0.0 if usage.receipt is None else usage.receipt.engine_ms

    def _begin_day(self) -> None:
        now = self._unix()
        self._ends_unix = now - now % _DAY_SECONDS + _DAY_SECONDS
        self._today = self._days.setdefault(datetime.fromtimestamp(now, UTC).date().isoformat(), {})
        for day in sorted(self._days)[:-_DAYS]:
            del self._days[day]

    def _add(self, service: str, caller: str, request_class: str) -> list[float]:
        """Return a new row, or that of further callers if there are too many rows."""
        key = service, caller, request_class
        if len(self._today) >= MAX_ROWS:
            key = service, OTHER_CALLERS, ""
        if len(self._today) >= 2 * MAX_ROWS:
            key = "", OTHER_CALLERS, ""
        return self._today.setdefault(key, [0, 0, 0, 0, 0.0])

    def build_page(self) -> Usage:
        """Return the counts."""
        return Usage(
            self._process, {day: [_build_row(*each) for each in rows.items()] for day, rows in self._days.items()}
        )


def _build_row(key: _Key, counts: list[float]) -> UsageRow:
    requests, prompt_tokens, cached_tokens, completion_tokens, engine_ms = counts
    return UsageRow(
        *key, int(requests), int(prompt_tokens), int(cached_tokens), int(completion_tokens), round(engine_ms, 3)
    )
