"""Prints chart.md, from the values of the chart and the comments above them: `python docs/chart.py`.

Called by `make generate`, and by `make check-generated`, which compares.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

VALUES = Path(__file__).resolve().parents[1] / "charts" / "conveyor" / "values.yaml"
_HEAD = """\
# Values of the chart

Written by `make generate` from the chart's `values.yaml`; do not edit.

Pass your own values with `-f values.yaml` or `--set name=value`. The chart rejects unknown names and wrong types.
To change one value later and keep the others, see [Operations](operations.md#change-values).
"""
_TABLE = "| value | default | meaning |\n| --- | --- | --- |\n"


@dataclass(frozen=True, slots=True)
class Value:
    """One value: its path, its default, None for a group of values, and the comment above it."""

    path: str
    default: Any
    comment: str
    is_group: bool


def read(text: str) -> Iterator[Value]:
    """Yield each value of a values.yaml in block style, groups before their members."""
    defaults: Any = yaml.safe_load(text)
    comment: list[str] = []
    parents: list[str] = []
    for line in text.splitlines():
        if found := re.match(r"( *)# ?(.*)", line):
            comment.append(found[2])
        elif found := re.match(r"( *)([\w-]+):(.*)", line):
            parents = [*parents[: len(found[1]) // 2], found[2]]
            default = defaults
            for name in parents:
                default = default[name]
            is_group = isinstance(default, dict) and not found[3].strip()
            yield Value(".".join(parents), default, " ".join(comment), is_group)
            comment = []
        elif not line.strip():
            comment = []


def page(text: str) -> Iterator[str]:
    values = list(read(text))
    tops = {value.path for value in values if value.is_group and "." not in value.path}
    yield _HEAD
    yield f"\n## For the whole installation\n{_TABLE}"
    yield from (_row(value) for value in values if value.path.partition(".")[0] not in tops)
    for value in values:
        if value.path in tops:
            yield f"\n## {value.path}\n{_sentence(value.comment)}{_TABLE}"
        elif value.path.partition(".")[0] in tops and not (value.is_group and not value.comment):
            yield _row(value)


def _sentence(comment: str) -> str:
    return f"{comment}\n\n" if comment else ""


def _row(value: Value) -> str:
    default = "" if value.is_group else f"`{_write(value.default)}`"
    return f"| `{value.path}` | {default} | {value.comment.replace('|', chr(92) + '|')} |\n"


def _write(default: Any) -> str:
    return default if isinstance(default, str) and default else json.dumps(default, ensure_ascii=False)


if __name__ == "__main__":
    print("".join(page(VALUES.read_text())), end="")
