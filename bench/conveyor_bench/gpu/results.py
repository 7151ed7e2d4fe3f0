"""A stage's results in a file of their own: one JSON object a line, written as they come. Plain data.

The first line says what they were measured on (`about`), then come rows of tables (`table`, and its columns), and last
how the stage ended (`end`: done, skipped, failed or timed out; `reason`; `seconds`).
"""

import json
from pathlib import Path
from typing import Any

Line = dict[str, Any]
DONE = "done"


class Results:
    """The file of one stage, in the folder of the suite."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.path = folder / f"{stage}.jsonl"

    def begin(self, about: Line) -> None:
        """Forgets what an earlier run wrote."""
        self.path.write_text("")
        self._write({"about": about})

    def row(self, table: str, **columns: object) -> None:
        """Also printed, so that whoever watches sees it."""
        self._write({"table": table, **columns})

    def end(self, how: str, seconds: float, reason: str | None = None) -> None:
        self._write({"end": how, "seconds": round(seconds, 1), **({"reason": reason} if reason else {})})

    def _write(self, line: Line) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        with self.path.open("a") as file:
            file.write(text + "\n")

    def read(self) -> list[Line]:
        """All whole lines so far; none if the stage never ran."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().split("\n")[:-1]]

    def how(self) -> str:
        """How the stage ended; "-" if it did not yet."""
        lines = self.read()
        return str(lines[-1].get("end", "-")) if lines else "-"
