"""Draws a case as an SVG with replicas and requests over time. Pure; used by `conveyor_kubectl.simulating`."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from conveyor_insight.simulate.run import Sample

_WIDTH: Final = 900
_HEIGHT: Final = 200  # of each of the two halves
_LEFT: Final = 60
_TOP: Final = 40


def build_svg(title: str, samples: Sequence[Sample]) -> str:
    """Return the SVG: desired and ready replicas above, requests in flight and waiting requests below."""
    halves: tuple[tuple[tuple[str, str, Callable[[Sample], int]], ...], ...] = (
        (("wanted", "#999999", lambda sample: sample.replicas), ("ready", "#1f77b4", lambda sample: sample.ready)),
        (
            ("in flight", "#2ca02c", lambda sample: sample.in_flight),
            ("waiting", "#d62728", lambda sample: sample.queue_depth),
        ),
    )
    size = f'width="{_WIDTH + 2 * _LEFT}" height="{2 * (_HEIGHT + _TOP) + _TOP}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    parts.append(f'<text x="{_LEFT}" y="20">{escape(title)}</text>')
    for row, lines in enumerate(halves):
        bottom = (row + 1) * (_HEIGHT + _TOP)
        most = max(1, max(read(sample) for _, _, read in lines for sample in samples))
        parts += _frame(bottom, most, samples[-1].at)
        for column, (name, colour, read) in enumerate(lines):
            parts.append(
                _curve([(sample.at / samples[-1].at, read(sample) / most) for sample in samples], bottom, colour)
            )
            x, y = _LEFT + 8 + 90 * column, bottom - _HEIGHT - 6
            parts.append(f'<text x="{x}" y="{y}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _frame(bottom: int, most: int, seconds: float) -> list[str]:
    return [
        f'<rect x="{_LEFT}" y="{bottom - _HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#dddddd"/>',
        f'<text x="{_LEFT - 6}" y="{bottom - _HEIGHT + 10}" text-anchor="end">{most}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{_LEFT + _WIDTH}" y="{bottom + 16}" text-anchor="end">{seconds:.0f} s</text>',
    ]


def _curve(points: Sequence[tuple[float, float]], bottom: int, colour: str) -> str:
    """Return a step curve: each value holds until the next sample. `points`: shares of the frame's width and height."""
    path, last = "", float(bottom)
    for x, y in points:
        path += f" {_LEFT + x * _WIDTH:.1f},{last:.1f} {_LEFT + x * _WIDTH:.1f},{(last := bottom - y * _HEIGHT):.1f}"
    return f'<polyline points="{path.strip()}" fill="none" stroke="{colour}"/>'
