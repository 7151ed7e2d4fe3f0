"""Draws docs/pictures: the D2 files there by D2, and the peers of docs/benchmarks.md from its table.

Called by `make pictures` with D2's program, and by `make check-generated` with `--check`, which needs none: a drawing
carries the hash of its source.
"""

import hashlib
import re
import subprocess
import sys
from pathlib import Path

from conveyor_insight.svg import Series, axis_for, bars

_DOCS = Path(__file__).parent
_PICTURES = _DOCS / "pictures"
_ROW = re.compile(r"^\| ([AC]) \| ([^|]+) \| ([\d.]+) \| ([\d.]+) \|", re.MULTILINE)
_LIGHT, _DARK = "0", "200"  # D2's numbers of themes


def main(arguments: list[str]) -> int:
    """Draws all, or with `--check` says which pictures are not what their sources say."""
    sources = sorted(_PICTURES.glob("*.d2"))
    if arguments == ["--check"]:
        stale = [source.with_suffix(".svg") for source in sources if not _is_drawn(source)]
        if (_PICTURES / "peers.svg").read_text() != draw_peers():
            stale.append(_PICTURES / "peers.svg")
        for picture in stale:
            print(f"docs/pictures/{picture.name} is out of date: run make pictures")
        return 1 if stale else 0
    (program,) = arguments
    for source in sources:
        draw(program, source)
    (_PICTURES / "peers.svg").write_text(draw_peers())
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


def _is_drawn(source: Path) -> bool:
    picture = source.with_suffix(".svg")
    return picture.exists() and picture.read_text().endswith(f"{_mark(source)}\n")


def _mark(source: Path) -> str:
    return f"<!-- of {source.name} {hashlib.sha256(source.read_bytes()).hexdigest()} -->"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
