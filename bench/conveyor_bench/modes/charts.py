"""Draws bars and ranges, each as one SVG in the frame of `conveyor_insight.svg`, and measures on further axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from conveyor_insight.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Series, draw_frame, draw_label, short


@dataclass(frozen=True, slots=True)
class MarkedAxis(Axis):
    """A linear axis with ticks at `marks`."""

    marks: tuple[float, ...]

    def ticks(self) -> list[float]:
        return list(self.marks)


@dataclass(frozen=True, slots=True)
class LogAxis(Axis):
    """A logarithmic axis, with ticks at `marks` or at powers of ten."""

    marks: tuple[float, ...] = ()

    def share(self, value: float) -> float:
        return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        if self.marks:
            return list(self.marks)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high * 1.001]


def log_axis_for(values: Sequence[float], unit: str) -> Axis:
    """Return a logarithmic axis for the positive ones of these values."""
    positive = [value for value in values if value > 0]
    return LogAxis(10.0 ** math.floor(math.log10(min(positive))), max(positive) * 1.3, unit)


def bars(
    title: str,
    subtitle: str,
    groups: Sequence[str],
    series: Sequence[Series],
    axis: Axis,
    bands: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Draw groups of bars, one bar for each series, whose values are (number,).

    `bands`: claimed ranges for a series, drawn behind its bars.
    """
    inner, slot, wide = _places(groups, series)
    body = ""
    for group, name in enumerate(groups):
        for number, one in enumerate(series):
            value = one.values[group][0]
            x = LEFT + slot * (group + 0.1) + wide * number
            if bands and one.name in bands:
                low, high = (inner * axis.share(edge) for edge in bands[one.name])
                body += f'<rect class="band" x="{x:.1f}" y="{TOP + inner - high:.1f}" width="{wide:.1f}" '
                body += f'height="{high - low:.1f}"/>'
            tall = inner * axis.share(value)
            label = f"{value:.0%}" if axis.unit == "%" else short(value)
            body += (
                f'<rect class="f{one.colour}" x="{x + wide * 0.12:.1f}" y="{TOP + inner - tall:.1f}" '
                f'width="{wide * 0.76:.1f}" height="{max(tall, 0.5):.1f}" rx="2">'
                f"<title>{escape(one.name)}, {escape(name)}: {label}</title></rect>"
                f"{draw_label(x + wide / 2, TOP + inner - tall - 4, label, 'middle')}"
            )
    return draw_frame(title, subtitle, axis, series, body + _group_names(groups, slot))


def ranges(title: str, subtitle: str, groups: Sequence[str], series: Sequence[Series], axis: Axis) -> str:
    """Draw a line from P50 to P99 for each group and series, with dots at its values (P50, P95, P99)."""
    inner, slot, wide = _places(groups, series)
    body = ""
    for group, name in enumerate(groups):
        for number, one in enumerate(series):
            x = LEFT + slot * (group + 0.1) + wide * (number + 0.5)
            at = [TOP + inner * (1 - axis.share(value)) for value in one.values[group]]
            shown = ", ".join(short(value) for value in one.values[group])
            body += f"<g><title>{escape(one.name)}, {escape(name)}: {shown}</title>"
            body += f'<line class="s{one.colour}" stroke-width="3" x1="{x:.1f}" x2="{x:.1f}" '
            body += f'y1="{at[0]:.1f}" y2="{at[-1]:.1f}"/>'
            body += "".join(
                f'<circle class="f{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
                for y, radius in zip(at, (6, 4, 3), strict=True)
            )
            body += "</g>"
            body += draw_label(x + 9, at[0] + 3, short(one.values[group][0]), "start")
    return draw_frame(title, subtitle, axis, series, body + _group_names(groups, slot))


def _places(groups: Sequence[str], series: Sequence[Series]) -> tuple[float, float, float]:
    slot = (WIDTH - LEFT - RIGHT) / len(groups)
    return HEIGHT - TOP - BOTTOM, slot, slot * 0.8 / len(series)


def _group_names(groups: Sequence[str], slot: float) -> str:
    def names() -> Iterator[str]:
        for group, name in enumerate(groups):
            x = LEFT + slot * (group + 0.5)
            yield f'<text class="fg" x="{x:.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{escape(name)}</text>'

    return "".join(names())
