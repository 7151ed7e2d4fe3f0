"""Draws bars, ranges and lines, each as one SVG. The SVG follows the light or dark mode of the reader's system.

Used by `tuning` and for measurements. A series has a name, a number for its colour, and values.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 66, 50
_LIGHT = ("#7a7f87", "#c2570c", "#8250c4", "#0b66c3", "#8a6d1f", "#1a7f4b", "#c0307b", "#0e7c86")
_DARK = ("#9aa1ab", "#f2954a", "#b493f0", "#5aa9ff", "#d9b84a", "#4fc48a", "#ff7ab8", "#45c4d0")
_STYLE = (
    "<style>"
    ".fg{fill:#1f2328}.dim{fill:#59636e}.grid{stroke:#d8dde3}.band{fill:#1f2328;opacity:.13}.paper{fill:#fff}"
    + "".join(f".f{n}{{fill:{c}}}.s{n}{{stroke:{c}}}" for n, c in enumerate(_LIGHT))
    + "@media(prefers-color-scheme:dark){.fg{fill:#e6edf3}.dim{fill:#9198a1}.grid{stroke:#343b44}"
    ".band{fill:#e6edf3;opacity:.2}.paper{fill:#0d1117}"
    + "".join(f".f{n}{{fill:{c}}}.s{n}{{stroke:{c}}}" for n, c in enumerate(_DARK))
    + "}text{font:12px system-ui,sans-serif}.title{font-size:15px;font-weight:600}.small{font-size:11px}"
    ".tiny{font-size:9.5px}</style>"
)


@dataclass(frozen=True, slots=True)
class Series:
    """Values in one colour: (number,) for bars, (P50, P95, P99) for ranges, and (x, y) for lines."""

    name: str
    colour: int
    values: Sequence[tuple[float, ...]]
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis from `low` to `high`. `is_log`: the axis is logarithmic."""

    low: float
    high: float
    unit: str
    is_log: bool = False
    marks: tuple[float, ...] = ()  # ticks to use instead of round numbers

    def share(self, value: float) -> float:
        """Return the position on the axis, 0 to 1."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (min(value, self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return the axis's `marks`, or round numbers if it has none."""
        if self.marks:
            return list(self.marks)
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            return [10.0**n for n in range(first, last + 1) if self.low <= 10.0**n <= self.high * 1.001]
        step = _round_step((self.high - self.low) / 5)
        return [self.low + n * step for n in range(int((self.high - self.low) / step + 1.001))]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def axis_for(values: Sequence[float], unit: str, *, is_log: bool = False) -> Axis:
    """Return an axis for these values."""
    if is_log:
        positive = [value for value in values if value > 0]
        return Axis(10.0 ** math.floor(math.log10(min(positive))), max(positive) * 1.3, unit, is_log=True)
    return Axis(0.0, max(values) * 1.1, unit)


def short(value: float) -> str:
    """Format a number: whole from 100 on, otherwise with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


Place = Callable[[float], float]


def _frame(title: str, subtitle: str, axis: Axis, series: Sequence[Series], body: str) -> str:
    inner = HEIGHT - _TOP - _BOTTOM
    grid = ""
    for tick in axis.ticks():
        y = _TOP + inner * (1 - axis.share(tick))
        label = f"{tick:.0%}" if axis.unit == "%" else short(tick)
        grid += f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += f'<text class="dim small" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    legend, x = "", float(_LEFT)
    for one in series:
        legend += f'<rect class="f{one.colour}" x="{x:.0f}" y="46" width="10" height="10" rx="2"/>'
        legend += f'<text class="fg small" x="{x + 14:.0f}" y="55">{escape(one.name)}</text>'
        x += 26 + 6.3 * len(one.name)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}. {escape(subtitle)}">{_STYLE}'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<text class="fg title" x="12" y="20">{escape(title)}</text>'
        f'<text class="dim small" x="12" y="37">{escape(subtitle)}</text>{grid}{body}{legend}</svg>'
    )


def bars(
    title: str,
    subtitle: str,
    groups: Sequence[str],
    series: Sequence[Series],
    axis: Axis,
    bands: Mapping[str, tuple[float, float]] | None = None,
) -> str:
    """Draw groups of bars, one bar for each series. `bands`: claimed ranges for a series, drawn behind its bars."""
    inner, slot, wide = _places(groups, series)
    body = ""
    for group, name in enumerate(groups):
        for number, one in enumerate(series):
            value = one.values[group][0]
            x = _LEFT + slot * (group + 0.1) + wide * number
            if bands and one.name in bands:
                low, high = (inner * axis.share(edge) for edge in bands[one.name])
                body += f'<rect class="band" x="{x:.1f}" y="{_TOP + inner - high:.1f}" width="{wide:.1f}" '
                body += f'height="{high - low:.1f}"/>'
            tall = inner * axis.share(value)
            label = f"{value:.0%}" if axis.unit == "%" else short(value)
            body += (
                f'<rect class="f{one.colour}" x="{x + wide * 0.12:.1f}" y="{_TOP + inner - tall:.1f}" '
                f'width="{wide * 0.76:.1f}" height="{max(tall, 0.5):.1f}" rx="2">'
                f"<title>{escape(one.name)}, {escape(name)}: {label}</title></rect>"
                f"{_number(x + wide / 2, _TOP + inner - tall - 4, label, 'middle')}"
            )
    return _frame(title, subtitle, axis, series, body + _group_names(groups, slot))


def ranges(title: str, subtitle: str, groups: Sequence[str], series: Sequence[Series], axis: Axis) -> str:
    """Draw a line from P50 to P99 for each group and series, with dots at P50, P95 and P99."""
    inner, slot, wide = _places(groups, series)
    body = ""
    for group, name in enumerate(groups):
        for number, one in enumerate(series):
            x = _LEFT + slot * (group + 0.1) + wide * (number + 0.5)
            at = [_TOP + inner * (1 - axis.share(value)) for value in one.values[group]]
            told = ", ".join(short(value) for value in one.values[group])
            body += f"<g><title>{escape(one.name)}, {escape(name)}: {told}</title>"
            body += f'<line class="s{one.colour}" stroke-width="3" x1="{x:.1f}" x2="{x:.1f}" '
            body += f'y1="{at[0]:.1f}" y2="{at[-1]:.1f}"/>'
            body += "".join(
                f'<circle class="f{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
                for y, radius in zip(at, (6, 4, 3), strict=True)
            )
            body += "</g>"
            body += _number(x + 9, at[0] + 3, short(one.values[group][0]), "start")
    return _frame(title, subtitle, axis, series, body + _group_names(groups, slot))


def lines(title: str, subtitle: str, series: Sequence[Series], across: Axis, axis: Axis) -> str:
    """Draw lines through points (x, y).

    A point shows its label, or its y if the series has no labels. A point near the previous point shows no label.
    """
    inner, wide = HEIGHT - _TOP - _BOTTOM, WIDTH - _LEFT - _RIGHT
    body = ""
    for tick in across.ticks():
        x = _LEFT + wide * across.share(tick)
        body += (
            f'<text class="dim small" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    body += (
        f'<text class="dim small" x="{WIDTH - _RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{escape(across.unit)}</text>'
    )
    for one in series:
        points = [(_LEFT + wide * across.share(x), _TOP + inner * (1 - axis.share(y))) for x, y in one.values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body += f'<polyline class="s{one.colour}" fill="none" stroke-width="2.2" points="{path}"/>'
        for index, (x, y) in enumerate(points):
            near = index and math.dist((x, y), points[index - 1]) < 12
            label = one.labels[index] if one.labels else short(one.values[index][1])
            told = f"{one.name}, {label}: {short(one.values[index][0])}, {short(one.values[index][1])}"
            body += (
                f'<circle class="f{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(told)}</title></circle>'
            )
            if not near:
                body += _number(x + 6, y - 5, label, "start")
    return _frame(title, subtitle, axis, series, body)


def _number(x: float, y: float, label: str, anchor: str) -> str:
    return f'<text class="dim tiny" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'


def _places(groups: Sequence[str], series: Sequence[Series]) -> tuple[float, float, float]:
    slot = (WIDTH - _LEFT - _RIGHT) / len(groups)
    return HEIGHT - _TOP - _BOTTOM, slot, slot * 0.8 / len(series)


def _group_names(groups: Sequence[str], slot: float) -> str:
    def names() -> Iterator[str]:
        for group, name in enumerate(groups):
            x = _LEFT + slot * (group + 0.5)
            yield f'<text class="fg" x="{x:.1f}" y="{HEIGHT - _BOTTOM + 20}" text-anchor="middle">{escape(name)}</text>'

    return "".join(names())
