"""Collects the results of a run: counts for `__main__`, and the tables of docs/peers-tests.md.

Pure except for that file.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOT_APPLICABLE = "not applicable: "
_BEGIN, _END = "<!-- results: written by make peers-tests -->", "<!-- end of results -->"
_REASON_CHARACTERS = 100


@dataclass(slots=True)
class Results:
    """The outcome of each test, and its reason. If a fixture fails after the test has passed, the test has failed."""

    outcomes: dict[str, tuple[str, str]] = field(default_factory=dict)

    def count(self, outcome: str, file: str = "") -> int:
        return sum(each == outcome for test, (each, _) in self.outcomes.items() if test.startswith(file))

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(test.partition("::")[0] for test in self.outcomes))

    def as_json(self) -> dict[str, Any]:
        """Return the results as JSON, for programs."""
        kinds = ("passed", "failed", "not_applicable")
        return {
            **{kind: self.count(kind) for kind in kinds},
            "files": {file: {kind: self.count(kind, f"{file}::") for kind in kinds} for file in self.files},
            "failures": {test: why for test, (outcome, why) in self.outcomes.items() if outcome == "failed"},
        }


def read_results(lines: Iterable[str]) -> Results:
    """Read the results that `plugin` has written."""
    results = Results()
    for line in lines:
        result = json.loads(line)
        outcome = {"skipped": "not_applicable"}.get(result["outcome"], result["outcome"])
        if results.outcomes.get(result["test"], ("", ""))[0] != "failed":
            results.outcomes[result["test"]] = (
                outcome,
                result["reason"].removeprefix("Skipped: ").removeprefix(NOT_APPLICABLE),
            )
    return results


def write_table(page: Path, results: Results, version: str) -> None:
    """Replace the tables in the page."""
    text = page.read_text()
    begin, end = text.index(_BEGIN), text.index(_END)
    page.write_text(text[:begin] + _BEGIN + "\n" + "\n".join(build_table(results, version)) + "\n" + text[end:])


def build_table(results: Results, version: str) -> list[str]:
    """Return the lines of the tables: the files, the reasons why tests do not apply, and the tests that fail."""
    counts = [results.count(kind) for kind in ("passed", "failed", "not_applicable")]
    lines = [
        f"vLLM {version}: {counts[0]} tests pass, {counts[1]} fail, {counts[2]} do not apply.",
        "",
        "| file below `tests/` | pass | fail | not applicable |",
        "| --- | --- | --- | --- |",
    ]
    for file in results.files:
        row = [results.count(kind, f"{file}::") for kind in ("passed", "failed", "not_applicable")]
        lines.append(f"| `{file}` | {row[0]} | {row[1]} | {row[2]} |")
    reasons = Counter(why for outcome, why in results.outcomes.values() if outcome == "not_applicable")
    lines += ["", "| tests | why they do not apply |", "| --- | --- |"]
    lines += [f"| {number} | {_cell(why)} |" for why, number in reasons.most_common()]
    failures = {test: why for test, (outcome, why) in results.outcomes.items() if outcome == "failed"}
    if failures:
        lines += ["", "| test that fails | with |", "| --- | --- |"]
        lines += [f"| `{_name(test)}` | {_cell(why)} |" for test, why in failures.items()]
    return lines


def _name(test: str) -> str:
    file, _, name = test.partition("::")
    return f"{Path(file).name}::{name}".replace("|", "\\|")[:_REASON_CHARACTERS]


def _cell(text: str) -> str:
    """Return the text as one line for a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;").replace("`", "'").replace("[", "\\[")
    return line if len(line) <= _REASON_CHARACTERS else line[: _REASON_CHARACTERS - 3] + "..."
