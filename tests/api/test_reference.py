"""The API reference says everything that the API server enforces."""

import re

import pytest
from tests.api.test_crd import NODES
from tests.api.test_refusals import sentences

from conveyor_api.conditions import ConditionType, Reason
from conveyor_api.crd import build_schema
from conveyor_api.reference import build_reference

PAGES = build_reference()
PAGE = "\n".join(PAGES[name] for name in ("api-pod", "api-reference", "api-status"))


def test_every_field_has_a_row() -> None:
    paths = [path for path in NODES if path.startswith((".spec.", ".status.")) and not path.endswith("[]")]
    assert ".spec.batching.mode" in paths
    for path in paths:
        section, _, field = path.removeprefix(".").rpartition(".")
        body = PAGE.partition(f"## {section}\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        assert f"| `{field}` |" in body, path


def test_every_sentence_is_there() -> None:
    assert not [sentence for sentence in sentences(build_schema()) if sentence not in PAGE]


def test_every_condition_and_reason_is_there() -> None:
    assert all(f"| `{word}` |" in PAGE for word in [*ConditionType, *Reason])


def test_a_page_can_be_read_in_one_sitting() -> None:
    assert PAGES.keys() == {"api-pod", "api-reference", "api-status"}
    assert not [name for name, page in PAGES.items() if len(page.splitlines()) > 750]


def test_every_row_has_as_many_cells_as_its_header() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines()}) == 1, table


def test_no_table_has_an_empty_column() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]
        assert all(any(column) for column in zip(*rows, strict=True)), table


@pytest.mark.parametrize("page", PAGES)
def test_headings_and_tables_stand_apart(page: str) -> None:
    lines = PAGES[page].splitlines()
    for number, line in enumerate(lines[1:], start=1):
        if line.startswith("#"):
            assert lines[number + 1] == "", line
            assert number == 1 or lines[number - 1] == "", line
    assert "\n\n\n" not in PAGES[page]
