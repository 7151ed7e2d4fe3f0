"""Keeps what the overview has shown of each service in the last 15 minutes, and its last scaling decisions. Pure."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from conveyor_console.overview import Line

MAX_POINTS: Final = 180  # 15 minutes, with a read every 5 seconds
_MAX_DECISIONS: Final = 20
_NAN: Final = float("nan")
_FIELDS: Final = ("queued", "at_engines", "ready", "desired", "tokens")


@dataclass(frozen=True, slots=True)
class Course:
    """The last values of one service, the oldest first. Values that are not known are NaN."""

    times: Sequence[float]
    """Unix times in seconds."""
    queued: Sequence[float]
    at_engines: Sequence[float]
    ready: Sequence[float]
    desired: Sequence[float]
    tokens: Sequence[float]
    """Generated tokens in a second."""


@dataclass(slots=True)
class _Kept:
    values: "array[float]"  # of all _FIELDS at one time, then of all at the next
    decisions: deque[tuple[float, str]]


class History:
    """The values of all services."""

    def __init__(self) -> None:
        self._times = deque[float](maxlen=MAX_POINTS)
        self._kept: dict[str, _Kept] = {}

    def add(self, lines: Iterable[Line], now: float) -> None:
        """Add the values of all existing services. now: Unix time."""
        self._times.append(now)
        before, self._kept = self._kept, {}
        for line in lines:
            key = line.service.key
            kept = self._kept[key] = before.get(key) or _Kept(array("f"), deque(maxlen=_MAX_DECISIONS))
            kept.values.extend(_read(line))
            del kept.values[: -MAX_POINTS * len(_FIELDS)]
            decision = line.service.scaling
            if decision and (not kept.decisions or kept.decisions[-1][1] != decision):
                kept.decisions.append((now, decision))

    def find_course(self, service: str) -> Course:
        """Return the values of a service. A new service has fewer."""
        values = self._kept[service].values if service in self._kept else array("f")
        number = len(values) // len(_FIELDS)
        times = list(self._times)[len(self._times) - number :]
        return Course(times, *(values[start :: len(_FIELDS)] for start in range(len(_FIELDS))))

    def list_decisions(self, service: str) -> list[tuple[float, str]]:
        """Return the decisions that the console has seen as (Unix time, words), the newest first."""
        return list(self._kept[service].decisions)[::-1] if service in self._kept else []


def _read(line: Line) -> tuple[float, ...]:
    requests, tokens = line.requests, line.figures.tokens_per_second
    return (
        _NAN if requests is None else requests.queued,
        _NAN if requests is None else requests.at_engines,
        line.service.ready_replicas,
        line.service.desired_replicas,
        _NAN if tokens is None else tokens,
    )
