"""Draws docs/pictures: the D2 files there by D2, and charts from the tables of docs/.

The charts are the peers of docs/benchmarks.md, the modes and the servers of docs/image-generation.md, the drafts of
docs/speculation.md, and the slots of docs/adapters.md.

Called by `make pictures` with D2's program, and by `make check-generated` with `--check`, which needs none: a drawing
carries the hash of its source.
"""

import hashlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from conveyor_bench.modes.charts import MarkedAxis, bars
from conveyor_insight.svg import Series, axis_for, lines

_DOCS = Path(__file__).parent
_PICTURES = _DOCS / "pictures"
_ROW = re.compile(r"^\| ([AC]) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
_PAINTED = re.compile(r"^\| (Dynamic|Continuous) \| ([\d.]+) \| ([\d.]+) \| [\d.]+ s \| ([\d.]+) s \|", re.MULTILINE)
_DRAFTED = re.compile(r"^\| (\d+) \| (\d+\.\d) \| (\d+\.\d) \| [\d.]+ \|$", re.MULTILINE)
_SERVED = re.compile(
    r"^\| ([\d.]+) \| ([\w ]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+) \| [\d.]+ s \| [\d.]+ s \|$", re.MULTILINE
)
_SLOTS = re.compile(r"^\| (\d+) \| ([\d.]+) s \| ([\d.]+) s \|$", re.MULTILINE)
_LIGHT, _DARK = "0", "200"  # D2's numbers of themes


def main(arguments: list[str]) -> int:
    """Draws all, or with `--check` says which pictures are not what their sources say."""
    sources = sorted(_PICTURES.glob("*.d2"))
    if arguments == ["--check"]:
        stale = [source.with_suffix(".svg") for source in sources if not _is_drawn(source)]
        charts = {_PICTURES / name: draw_chart() for name, draw_chart in CHARTS.items()}
        stale += [path for path, chart in charts.items() if not path.exists() or path.read_text() != chart]
        for picture in stale:
            print(f"docs/pictures/{picture.name} is out of date: run make pictures")
        return 1 if stale else 0
    (program,) = arguments
    for source in sources:
        draw(program, source)
    for name, draw_chart in CHARTS.items():
        (_PICTURES / name).write_text(draw_chart())
    return 0


def draw(program: str, source: Path) -> None:
    """One drawing, light or dark as the reader's system is."""
    picture = source.with_suffix(".svg")
    options = ["--theme", _LIGHT, "--dark-theme", _DARK, "--pad", "20", "--layout", "elk"]
    subprocess.run([program, *options, str(source), str(picture)], check=True)
    picture.write_text(f"{picture.read_text()}\n{_mark(source)}\n")


def draw_peers() -> str:
    """Tokens a second of the engine and of each peer, from the table."""
    rows = _ROW.findall((_DOCS / "benchmarks.md").read_text())
    groups = [f"{workload}: {peer.strip('`')}" for workload, peer, _, _ in rows]
    series = [
        Series("Conveyor", 3, [(float(ours),) for _, _, ours, _ in rows]),
        Series("the peer", 0, [(float(theirs),) for _, _, _, theirs in rows]),
    ]
    axis = axis_for([value for one in series for (value,) in one.values], "tokens/s")
    subtitle = "Qwen3-0.6B's shape in bfloat16, two CPU cores; A: 32 requests at once, C: one request"
    return bars("Output tokens a second beside each peer", subtitle, groups, series, axis) + "\n"


def draw_paint_latency() -> str:
    """P95 of a picture against the arrival rate, for each mode, from the table."""
    return _draw_painted("95 of 100 pictures are done within this time", "seconds from the arrival to the picture", 2)


def draw_paint_throughput() -> str:
    """Pictures a second against the arrival rate, for each mode, from the table."""
    return _draw_painted("Pictures a second", "pictures that are done in a second", 1)


def _draw_painted(title: str, subtitle: str, column: int) -> str:
    """column: of the numbers in a row, which are the arrival rate, the rate of pictures, and P95."""
    rows = _PAINTED.findall((_DOCS / "image-generation.md").read_text())
    colours = {"Continuous": 3, "Dynamic": 1}
    points = [(row[0], float(row[1]), float(row[1 + column])) for row in rows]
    subtitle = f"{subtitle}; demo-paint on one thread of a CPU"
    return _draw_points(title, subtitle, "pictures that arrive in a second", colours, points)


def draw_drafts() -> str:
    """Tokens a second against the requests at once, with drafts and without, from the table."""
    rows = _DRAFTED.findall((_DOCS / "speculation.md").read_text())
    subtitle = "tokens a second; a shape of two layers in bfloat16 on one thread of a CPU"
    colours = {"with drafts": 3, "without": 0}
    points = _split_columns(rows, colours)
    title = "Answers that edit code, with drafts and without"
    return _draw_points(title, subtitle, "requests at once", colours, points)


def draw_served() -> str:
    """Pictures within the objective in a second against the load, for each server, from the table."""
    rows = _SERVED.findall((_DOCS / "image-generation.md").read_text())
    subtitle = "pictures a second that are done within the objective; a tiny SDXL on one thread of a CPU"
    colours = {"Continuous": 3, "Dynamic": 1, "diffusers behind LitServe": 0}
    points = [(system, float(load), float(rate)) for load, system, rate in rows]
    return _draw_points("Pictures in time over HTTP", subtitle, "part of the capacity that arrives", colours, points)


def draw_slots() -> str:
    """P95 of the first token against the adapters with requests, with 8 slots and with 64, from the table."""
    rows = _SLOTS.findall((_DOCS / "adapters.md").read_text())
    subtitle = "seconds from the request, for 95 of 100 requests; a shape of two layers on one thread of a CPU"
    colours = {"8 slots": 3, "a slot for each of 64": 0}
    points = _split_columns(rows, colours)
    title = "First token with more adapters than slots"
    return _draw_points(title, subtitle, "adapters that get requests", colours, points)


Points = Sequence[tuple[str, float, float]]  # the name of the series, and a point of it


def _split_columns(rows: Iterable[Sequence[str]], names: Iterable[str]) -> Points:
    """Return the points of a table whose first column is the place, and whose others are a series each."""
    return [(name, float(row[0]), float(row[column])) for row in rows for column, name in enumerate(names, start=1)]


def _draw_points(title: str, subtitle: str, across: str, colours: Mapping[str, int], points: Points) -> str:
    """colours: of the series, in their order."""
    series = [Series(name, colour, [(x, y) for one, x, y in points if one == name]) for name, colour in colours.items()]
    marks = sorted({x for _, x, _ in points})
    below = MarkedAxis(0.0, marks[-1] * 1.05, across, marks=tuple(marks))
    return lines(title, subtitle, series, below, axis_for([y for _, _, y in points], "")) + "\n"


CHARTS: dict[str, Callable[[], str]] = {
    "peers.svg": draw_peers,
    "paint-latency.svg": draw_paint_latency,
    "paint-throughput.svg": draw_paint_throughput,
    "paint-served.svg": draw_served,
    "drafts.svg": draw_drafts,
    "adapter-slots.svg": draw_slots,
}


def _is_drawn(source: Path) -> bool:
    picture = source.with_suffix(".svg")
    return picture.exists() and picture.read_text().endswith(f"{_mark(source)}\n")


def _mark(source: Path) -> str:
    return f"<!-- of {source.name} {hashlib.sha256(source.read_bytes()).hexdigest()} -->"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
