"""Writes the results of all stages in Markdown, for docs/benchmarks.md. Called by `suite`. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from conveyor_bench.gpu.results import Line


def write_tables(stages: Mapping[str, list[Line]]) -> str:
    """Return a section for each stage that has lines."""
    return "\n".join(_section(stage, lines) for stage, lines in stages.items() if lines)


def _section(stage: str, lines: list[Line]) -> str:
    about: dict[str, Any] = next((line["about"] for line in lines if "about" in line), {})
    end = next((line for line in lines if "end" in line), {"end": "not ended"})
    facts = ", ".join(f"{key} {value}" for key, value in about.items())
    ended = ", ".join(f"{value} s" if key == "seconds" else str(value) for key, value in end.items())
    names = dict.fromkeys(line["table"] for line in lines if "table" in line)
    tables = (_table(name, [line for line in lines if line.get("table") == name]) for name in names)
    return "\n".join([f"### {stage}", f"{facts}. Stage: {ended}.", "", *tables])


def _table(name: str, rows: list[Line]) -> str:
    columns = list(dict.fromkeys(column for row in rows for column in row if column != "table"))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    return "\n".join([f"{name}:", "", *map(_line, [columns, ["---"] * len(columns), *cells]), ""])


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
