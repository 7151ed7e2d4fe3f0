"""Draws lines as one SVG, which follows the light or dark mode of the reader's system.

A series has a name, a number for its colour, and values. `conveyor_bench.modes.charts` and `e2e.demo.picture` draw
with its parts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 66, 50
_LIGHT = ("#7a7f87", "#c2570c", "#8250c4", "#0b66c3", "#8a6d1f", "#1a7f4b", "#c0307b", "#0e7c86")
_DARK = ("#9aa1ab", "#f2954a", "#b493f0", "#5aa9ff", "#d9b84a", "#4fc48a", "#ff7ab8", "#45c4d0")
STYLE = (
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
    """Values in one colour; (x, y) for lines."""

    name: str
    colour: int
    values: Sequence[tuple[float, ...]]
    labels: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis from `low` to `high`."""

    low: float
    high: float
    unit: str

    def share(self, value: float) -> float:
        """Return the position on the axis, 0 to 1."""
        return (min(value, self.high) - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Return round numbers."""
        step = _round_step((self.high - self.low) / 5)
        return [self.low + n * step for n in range(int((self.high - self.low) / step + 1.001))]


def _round_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)


def axis_for(values: Sequence[float], unit: str) -> Axis:
    """Return an axis for these values."""
    return Axis(0.0, max(values) * 1.1, unit)


def short(value: float) -> str:
    """Format a number: whole from 100 on, otherwise with three significant digits."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def draw_frame(title: str, subtitle: str, axis: Axis, series: Sequence[Series], body: str) -> str:
    """Draw `body` with the titles, the names of the series, and a grid of the vertical axis."""
    grid = draw_grid(axis, (LEFT, WIDTH - RIGHT), (TOP, HEIGHT - BOTTOM))
    legend = draw_legend([(one.name, one.colour) for one in series], LEFT, 46)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}. {escape(subtitle)}">{STYLE}'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<text class="fg title" x="12" y="20">{escape(title)}</text>'
        f'<text class="dim small" x="12" y="37">{escape(subtitle)}</text>{grid}{body}{legend}</svg>'
    )


def draw_grid(axis: Axis, across: tuple[int, int], down: tuple[int, int]) -> str:
    """Draw a line for each tick of a vertical axis, with its number at the left. `down`: top and bottom."""
    grid = ""
    for tick in axis.ticks():
        y = down[0] + (down[1] - down[0]) * (1 - axis.share(tick))
        label = f"{tick:.0%}" if axis.unit == "%" else short(tick)
        grid += f'<line class="grid" x1="{across[0]}" x2="{across[1]}" y1="{y:.1f}" y2="{y:.1f}"/>'
        grid += f'<text class="dim small" x="{across[0] - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    return grid


def draw_legend(names: Sequence[tuple[str, int]], left: float, top: float) -> str:
    """Draw a square in the colour of each name, and the name."""
    legend, x = "", float(left)
    for name, colour in names:
        legend += f'<rect class="f{colour}" x="{x:.0f}" y="{top:g}" width="10" height="10" rx="2"/>'
        legend += f'<text class="fg small" x="{x + 14:.0f}" y="{top + 9:g}">{escape(name)}</text>'
        x += 26 + 6.3 * len(name)
    return legend


def lines(title: str, subtitle: str, series: Sequence[Series], across: Axis, axis: Axis) -> str:
    """Draw lines through points (x, y).

    A point shows its label, or its y if the series has no labels. A point near the previous point shows no label.
    """
    inner, wide = HEIGHT - TOP - BOTTOM, WIDTH - LEFT - RIGHT
    body = ""
    for tick in across.ticks():
        x = LEFT + wide * across.share(tick)
        body += (
            f'<text class="dim small" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>'
        )
    body += (
        f'<text class="dim small" x="{WIDTH - RIGHT}" y="{HEIGHT - 12}" text-anchor="end">{escape(across.unit)}</text>'
    )
    for one in series:
        points = [(LEFT + wide * across.share(x), TOP + inner * (1 - axis.share(y))) for x, y in one.values]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body += f'<polyline class="s{one.colour}" fill="none" stroke-width="2.2" points="{path}"/>'
        for index, (x, y) in enumerate(points):
            near = index and math.dist((x, y), points[index - 1]) < 12
            label = one.labels[index] if one.labels else short(one.values[index][1])
            hint = f"{one.name}, {label}: {short(one.values[index][0])}, {short(one.values[index][1])}"
            body += (
                f'<circle class="f{one.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(hint)}</title></circle>'
            )
            if not near:
                body += draw_label(x + 6, y - 5, label, "start")
    return draw_frame(title, subtitle, axis, series, body)


def draw_label(x: float, y: float, label: str, anchor: str) -> str:
    """Draw small text. `anchor`: which part of the text is at x: start, middle or end."""
    return f'<text class="dim tiny" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(label)}</text>'
