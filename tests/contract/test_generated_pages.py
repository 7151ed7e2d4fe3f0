"""Tests that the generated pages on commands and on the chart's values leave nothing out."""

import re
from collections.abc import Container, Iterator

import yaml
from docs.chart import VALUES, read

from e2e.cluster.paths import REPOSITORY


def test_each_argument_of_a_command_has_a_meaning() -> None:
    rows = re.findall(r"^\| `([^`]+)`.* \| (.*) \|$", (REPOSITORY / "docs/cli.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert not [argument for argument, meaning in rows if len(meaning) < 5]


def test_each_value_of_the_chart_has_a_row_with_its_default() -> None:
    text = VALUES.read_text()
    page = (REPOSITORY / "docs/chart.md").read_text()
    found = {value.path: value.default for value in read(text) if not value.is_group}
    assert found == dict(_flatten(yaml.safe_load(text), "", found.keys()))
    assert not [path for path in found if f"| `{path}` |" not in page]


def _flatten(values: dict[str, object], before: str, whole: Container[str]) -> Iterator[tuple[str, object]]:
    """Yield the leaves of the values. A path in `whole` is a leaf, although its value may have members."""
    for name, value in values.items():
        path = f"{before}{name}"
        if isinstance(value, dict) and path not in whole:
            yield from _flatten(value, f"{path}.", whole)
        else:
            yield path, value
