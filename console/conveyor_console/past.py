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
    """What is shown. `spans`: those that can be chosen. Times are Unix times in seconds."""

    spans: Sequence[str]
    span: str
    first: float
    last: float
    step: float
    """Between two times of the slider."""
    chosen: float
    at: str
    """The chosen time as people read it; "" without any."""
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


def parse_time(text: str) -> float | None:
    """Return the Unix time; None if the text has none."""
    try:
        at = float(text[:32])
    except ValueError:
        return None
    return at if math.isfinite(at) else None


def build_past(lines: TimeLines, span: str, spans: Sequence[str], chosen: float | None, problem: str) -> Past:
    """Return the state at the time of the lines that is nearest to the chosen one, by default the last.

    chosen: a Unix time, which stays the same while the lines go on. problem: what is missing, or "".
    """
    times = lines.times or (0.0,)
    wanted = times[-1] if chosen is None else min(max(times[0], chosen), times[-1])
    point = min(range(len(times)), key=lambda number: abs(times[number] - wanted))
    charts = [
        draw_lines(title, lines.times, **{name: lines.values[name] for name in names if name in lines.values})
        for title, names in _CHARTS.items()
        if names[0] in lines.values
    ]
    at = datetime.fromtimestamp(times[point], UTC).strftime("%Y-%m-%d %H:%M:%S") if lines.times else ""
    state = [(name, _show(name, each[point])) for name, each in lines.values.items()] if lines.times else []
    began, ended = times[0], times[-1]
    step = max(1, 1000 * (ended - began) // max(1, len(times) - 1)) / 1000  # rounded down, so the last time is a step
    mark = WIDTH * (times[point] - began) / (ended - began) if ended > began else 0.0
    first, last, chosen = (round(each, 3) for each in (began, ended, times[point]))  # as browsers write steps exactly
    return Past(spans, span, first, last, step, chosen, at, state, charts, round(mark, 1), problem)


def _show(name: str, value: float) -> str:
    if name == FIRST_BYTE and not math.isnan(value):
        return show_seconds(value)
    return show_number(value)
