"""Computes pictures: an engine's last steps as bars over time, and values over time as lines. Pure.

The templates draw them as SVG. Coordinates are those of the pictures' own boxes.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Final

from conveyor_protocol.engine_pages import StepRecord

WIDTH: Final = 720
STEPS_HEIGHT: Final = 120
LINES_HEIGHT: Final = 72
_MIN_WIDTH: Final = 0.6
_GAP_SHARE: Final = 0.02  # of the picture, the most that a pause between two steps takes


@dataclass(frozen=True, slots=True)
class Bar:
    """One step. `kind`: the class of its colour. `padding`: the height of the part that computed dummies."""

    x: float
    width: float
    y: float
    height: float
    padding: float
    kind: str
    closed: bool
    title: str


@dataclass(frozen=True, slots=True)
class StepPicture:
    """The last steps of one engine. A bar is as wide as its step took, and as high as it had rows."""

    engine: str
    bars: Sequence[Bar]
    most_rows: int
    summary: str


def draw_steps(engine: str, steps: Sequence[StepRecord]) -> StepPicture:
    """Return the picture. Long pauses between steps are cut short."""
    most = max(each.rows for each in steps)
    busy = sum(each.seconds for each in steps) or 1e-9
    gaps = [
        min(max(0.0, after.ended - after.seconds - before.ended), _GAP_SHARE * busy)
        for before, after in pairwise(steps)
    ]
    scale, x, bars = WIDTH / (busy + sum(gaps)), 0.0, []
    for step, gap in zip(steps, [0.0, *gaps], strict=True):
        x += gap * scale
        width, height = step.seconds * scale, STEPS_HEIGHT * step.rows / max(1, most)
        bars.append(_build_bar(step, x, max(_MIN_WIDTH, width), height))
        x += width
    return StepPicture(engine, bars, most, _summarize(steps, busy))


def _build_bar(step: StepRecord, x: float, width: float, height: float) -> Bar:
    kind = "both" if step.prompt_tokens and step.generated_tokens else "prompts" if step.prompt_tokens else "decodes"
    share = min(1.0, max(0.0, step.padding_share))
    padding = f", {share:.0%} padding" if share else ""
    closed = f", batch closed by {step.closed_by}" if step.closed_by else ""
    title = f"{show_time(step.ended)}: {1000 * step.seconds:.1f} ms, {step.rows} rows, {step.tokens} tokens"
    return Bar(
        round(x, 2),
        round(width, 2),
        round(STEPS_HEIGHT - height, 2),
        round(height, 2),
        round(height * share, 2),
        kind,
        step.closed_by is not None,
        f"{title}{padding}{closed}, {step.waiting} waiting",
    )


def _summarize(steps: Sequence[StepRecord], busy_seconds: float) -> str:
    rows = sum(each.rows * each.seconds for each in steps) / busy_seconds
    tokens = sum(each.tokens for each in steps) or 1
    padding = sum(each.padding_share * each.tokens for each in steps) / tokens
    closes = Counter(each.closed_by for each in steps if each.closed_by)
    words = ", ".join(f"{reason} {number}" for reason, number in closes.most_common())
    text = f"{len(steps)} steps in {busy_seconds:.2f} s of work: {rows:.1f} rows on average, {padding:.0%} padding"
    return f"{text}; batches closed by {words}." if words else f"{text}."


@dataclass(frozen=True, slots=True)
class Curve:
    """One line. `points`: for SVG. `last`: the newest value in words."""

    name: str
    points: str
    last: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines with a common scale from 0 to `top`."""

    title: str
    curves: Sequence[Curve]
    top: str
    seconds: int
    """The time that the lines show."""


def draw_lines(title: str, times: Sequence[float], **values: Sequence[float]) -> Chart:
    """Return lines of the values over time, by name. NaN: not known, left out."""
    known = [value for each in values.values() for value in each if not math.isnan(value)]
    top = max(1.0, *known) if known else 1.0
    began, seconds = (times[0], max(1e-9, times[-1] - times[0])) if times else (0.0, 1.0)
    curves = [
        Curve(
            name.replace("_", " "),
            " ".join(
                f"{WIDTH * (at - began) / seconds:.1f},{LINES_HEIGHT * (1 - value / top):.1f}"
                for at, value in zip(times, each, strict=True)
                if not math.isnan(value)
            ),
            show_number(each[-1]) if len(each) else "–",
        )
        for name, each in values.items()
    ]
    return Chart(title, curves, show_number(top), round(seconds))


def show_number(value: float) -> str:
    """Return a value with about two digits; "–" for NaN."""
    return "–" if math.isnan(value) else f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def show_time(unix_seconds: float) -> str:
    """Return the time of day in UTC; "?" for a time that is none."""
    try:
        return datetime.fromtimestamp(unix_seconds, UTC).strftime("%H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return "?"
