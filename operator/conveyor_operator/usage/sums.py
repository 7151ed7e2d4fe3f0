"""Adds up what the gateways have counted, by day, and keeps it within bounds. Pure. Used by `keeper` only.

A day has the rows of each process of a gateway, as the process counted them last. So a page may be read any number of
times, also by another operator. Days that gateways count no more have one list of rows. Each day has a part of the
object's bytes, so that long names or many rows of one day remove no other day.
"""

from collections.abc import Iterable, Mapping
from datetime import date, timedelta
from typing import Final

import msgspec

from conveyor_protocol.usage_rows import Usage, UsageRow, limit_rows, sum_rows

DAYS: Final = 31
MAX_ROWS: Final = 300  # of a day that is over
MAX_PROCESSES: Final = 32  # of a day; those that are gone longest are added up
MAX_BYTES: Final = 900_000  # of all days; a ConfigMap has at most 1 MiB
_OPEN_BYTES: Final = 120_000  # of today, and of yesterday
_OVER_BYTES: Final = (MAX_BYTES - 2 * _OPEN_BYTES) // (DAYS - 2)  # of any other day
_OVER: Final = "over"  # the rows of processes that are gone
PODS: Final = "pods"  # the rows with the time of pods, which the operator counts

Day = dict[str, list[UsageRow]]  # by process
_DECODER: Final = msgspec.json.Decoder(Day)


class Sums:
    """The sums of up to DAYS days."""

    def __init__(self) -> None:
        self.days: dict[str, Day] = {}
        self._texts: dict[str, str] = {}  # as they are stored

    def load(self, data: dict[str, str]) -> None:
        """Load what was stored. Days that cannot be read are dropped."""
        for day, text in data.items():
            try:
                date.fromisoformat(day)
                self.days[day] = _DECODER.decode(text)
                self._texts[day] = text
            except (ValueError, msgspec.DecodeError):
                continue

    def add(
        self, pages: Iterable[Usage], today: date, pod_seconds: Mapping[str, float] | None = None
    ) -> dict[str, str | None]:
        """Add the gateways' pages. Return the days whose text has changed; None: to be removed.

        pod_seconds: how long pods of each service were on nodes since the last call; it counts for today.
        """
        yesterday, touched = today - timedelta(days=1), set[str]()
        if pod_seconds:
            self._add_pods(today.isoformat(), pod_seconds)
            touched.add(today.isoformat())
        for page in pages:
            for day, rows in page.days.items():
                if yesterday <= _parse(day) <= today:
                    of_day = self.days.setdefault(day, {})
                    if of_day.get(page.process) != rows:
                        of_day.pop(page.process, None)  # the one that changed last comes last
                        of_day[page.process] = rows
                        touched.add(day)
        for day, of_day in list(self.days.items()):
            kept = MAX_PROCESSES // 2 if _parse(day) >= yesterday else 0
            if _parse(day) <= today - timedelta(days=DAYS):
                del self.days[day]
            elif len(of_day) > MAX_PROCESSES or (not kept and of_day.keys() - {PODS} != {_OVER}):
                self.days[day] = _close(of_day, kept)
                touched.add(day)
        texts = {
            day: _encode(rows, _OPEN_BYTES if _parse(day) >= yesterday else _OVER_BYTES)
            if day in touched
            else self._texts[day]
            for day, rows in self.days.items()
        }
        while sum(map(len, texts.values())) > MAX_BYTES and len(texts) > 1:
            oldest = min(texts)
            del texts[oldest], self.days[oldest]
        changed: dict[str, str | None] = {day: text for day, text in texts.items() if self._texts.get(day) != text}
        changed |= dict.fromkeys(self._texts.keys() - texts.keys())
        self._texts = texts
        return changed

    def _add_pods(self, day: str, seconds: Mapping[str, float]) -> None:
        of_day = self.days.setdefault(day, {})
        rows = (UsageRow(service, "", "", pod_seconds=each) for service, each in seconds.items())
        of_day[PODS] = limit_rows(sum_rows([*of_day.get(PODS, ()), *rows]), MAX_ROWS)


def _parse(day: str) -> date:
    try:
        return date.fromisoformat(day)
    except ValueError:
        return date.min


def _encode(day: Day, max_bytes: int) -> str:
    """Return a day's text, with as many rows of each process as fit, at least one. The sums stay."""
    most = max(map(len, day.values()), default=1)
    while len(text := msgspec.json.encode(day)) > max_bytes and most > 1:
        most = max(1, most * max_bytes // len(text))
        day = {process: limit_rows(rows, most) for process, rows in day.items()}
    return text.decode()


def _close(day: Day, kept: int) -> Day:
    """Add up the rows of all processes but the last `kept` ones."""
    processes = [each for each in day if each not in (_OVER, PODS)]
    over = processes[: max(0, len(processes) - kept)]
    rows = sum_rows(row for process in (_OVER, *over) for row in day.get(process, ()))
    kept_processes = [*processes[len(over) :], *(() if PODS not in day else (PODS,))]
    return {_OVER: limit_rows(rows, MAX_ROWS)} | {process: day[process] for process in kept_processes}
