"""Counts what callers use, by day, service and class. Filled by `record`; the operator reads it (`/usage`).

The operator adds up the counts of all gateways, and keeps them for a month. `kubectl conveyor usage` prints them.
"""

import secrets
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

import msgspec

from conveyor_protocol.usage import UsedTokens
from conveyor_protocol.usage_rows import Usage, UsageRow, limit_rows

MAX_ROWS: Final = 300  # of a day on the page; in memory a day has up to twice as many
_DAYS: Final = 2
_DAY_SECONDS: Final = 86_400

_Day = dict[tuple[str, str, str], list[float]]


class UsageBook:
    """The counts of this process, for today and yesterday in UTC. A request counts on the day of its end."""

    def __init__(self, unix: Callable[[], float] = time.time) -> None:
        self._unix = unix
        self._process = secrets.token_hex(8)
        self._days: dict[str, _Day] = {}
        self._today: _Day = {}
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
        """Return a new row. If there are too many, those of the namespaces with most rows are added up."""
        if len(self._today) >= 2 * MAX_ROWS:
            _limit(self._today)
        return self._today.setdefault((service, caller, request_class), [0, 0, 0, 0, 0.0])

    def build_page(self) -> Usage:
        """Return the counts."""
        return Usage(self._process, {day: limit_rows(_build_rows(rows), MAX_ROWS) for day, rows in self._days.items()})


def _limit(day: _Day) -> None:
    rows = limit_rows(_build_rows(day), MAX_ROWS)
    day.clear()
    for row in rows:
        service, caller, request_class, *counts, _ = msgspec.structs.astuple(row)
        day[service, caller, request_class] = counts  # without the time of pods, which the operator counts


def _build_rows(day: _Day) -> list[UsageRow]:
    return [
        UsageRow(*key, int(requests), int(prompt), int(cached), int(completion), round(engine_ms, 3))
        for key, (requests, prompt, cached, completion, engine_ms) in day.items()
    ]
