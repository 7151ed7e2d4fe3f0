"""Builds what the page of a service shows of the past: time lines, and the state at a chosen time. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from conveyor_console.history import Course
from conveyor_console.overview import show_seconds
from conveyor_console.pictures import WIDTH, Chart, draw_lines, show_number

NUM_POINTS: Final = 181
SPANS: Final[Mapping[str, int]] = {  # seconds by name; multiples of NUM_POINTS - 1
    "15m": 900,
    "1h": 3600,
    "6h": 21_600,
    "1d": 86_400,
    "7d": 604_800,
}
QUEUED: Final = "queued"
AT_ENGINES: Final = "at engines"
READY: Final = "ready"
DESIRED: Final = "desired"
TOKENS: Final = "generated"
FIRST_BYTE: Final = "first byte, P95"
_CHARTS: Final = {
    "Requests": (QUEUED, AT_ENGINES),
    "Replicas": (READY, DESIRED),
    "Tokens/s": (TOKENS,),
    "Seconds": (FIRST_BYTE,),
}


@dataclass(frozen=True, slots=True)
class TimeLines:
    """Values by name, the oldest first, at the same times. What is not known is NaN."""

    times: Sequence[float]
    """Unix times in seconds."""
    values: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Past:
    """What is shown. `spans`: those that can be chosen. `point`: the chosen time's number."""

    spans: Sequence[str]
    span: str
    last: int
    point: int
    at: str
    """The chosen time; "" without any."""
    state: Sequence[tuple[str, str]]
    charts: Sequence[Chart]
    mark: float
    """Where the chosen time is on the charts."""
    problem: str


def convert_course(course: Course) -> TimeLines:
    """Return what the console has in its memory."""
    values = {
        QUEUED: course.queued,
        AT_ENGINES: course.at_engines,
        READY: course.ready,
        DESIRED: course.desired,
        TOKENS: course.tokens,
    }
    return TimeLines(course.times, values)


def build_past(lines: TimeLines, span: str, spans: Sequence[str], point: int | None, problem: str) -> Past:
    """Return the state at a point of the lines, by default the last one. problem: what is missing, or ""."""
    last = max(0, len(lines.times) - 1)
    point = last if point is None else min(max(0, point), last)
    charts = [
        draw_lines(title, lines.times, **{name: lines.values[name] for name in names if name in lines.values})
        for title, names in _CHARTS.items()
        if names[0] in lines.values
    ]
    at = datetime.fromtimestamp(lines.times[point], UTC).strftime("%Y-%m-%d %H:%M:%S") if lines.times else ""
    state = [(name, _show(name, each[point])) for name, each in lines.values.items()] if lines.times else []
    began, ended = (lines.times[0], lines.times[-1]) if lines.times else (0.0, 0.0)
    mark = WIDTH * (lines.times[point] - began) / (ended - began) if ended > began else 0.0
    return Past(spans, span, last, point, at, state, charts, round(mark, 1), problem)


def _show(name: str, value: float) -> str:
    if name == FIRST_BYTE and not math.isnan(value):
        return show_seconds(value)
    return show_number(value)
