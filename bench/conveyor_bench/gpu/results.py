"""Writes a stage's results immediately to the stage's file, one JSON object per line. Plain data.

The first line says what the results were measured on (`about`). Then come rows of tables (`table`, and its columns).
The last line says how the stage ended (`end`: done, skipped, failed or timed out; `reason`; `seconds`).
"""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
DONE = "done"


class Results:
    """The file of a stage, in the folder of the suite."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.path = folder / f"{stage}.jsonl"

    def begin(self, about: Line) -> None:
        """Remove the results of an earlier run, and write the first line."""
        self.path.write_text("")
        self._write({"about": about})

    def row(self, table: str, **columns: object) -> None:
        """Write a row, and print it for people who watch the run."""
        self._write({"table": table, **columns})

    def end(self, how: str, seconds: float, reason: str | None = None) -> None:
        self._write({"end": how, "seconds": round(seconds, 1), **({"reason": reason} if reason else {})})

    def _write(self, line: Line) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(text + "\n")

    def read(self) -> list[Line]:
        """Return all complete lines so far; none if the stage never ran."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]

    def how(self) -> str:
        """Return how the stage ended; "-" if it has not ended."""
        lines = self.read()
        return str(lines[-1].get("end", "-")) if lines else "-"
