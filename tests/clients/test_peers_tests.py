"""vLLM's own tests against the engine: how its arguments become settings, and how results become tables."""

import json
import re
from pathlib import Path

import pytest

from e2e.cluster.paths import REPOSITORY
from e2e.peers_tests import page
from e2e.peers_tests.arguments import NotApplicable, translate
from e2e.peers_tests.files import FILES
from e2e.peers_tests.page import build_table, read_results
from e2e.peers_tests.templates import with_changes


def test_arguments_with_a_setting_keep_their_value_and_parsers_are_off_unless_named() -> None:
    words = ["--enforce-eager", "--max-model-len", "2048", "--port=9", "--no-enable-prefix-caching"]
    assert translate(words).settings == [
        *("--max-model-len", "2048", "--port", "9", "--prefix-caching", "false"),
        *("--tool-parser", "none", "--reasoning-parser", "none"),
    ]
    named = translate(["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"])
    assert named.settings == ["--tool-parser", "hermes", "--reasoning-parser", "think"]


@pytest.mark.parametrize(
    ("words", "why"),
    [(["--uds", "/x"], "unix sockets"), (["--tool-call-parser", "granite"], "another format than hermes")],
)
def test_what_the_engine_lacks_is_told(words: list[str], why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        translate(words)


def test_an_unknown_argument_is_no_reason_to_leave_a_test_out() -> None:
    with pytest.raises(ValueError, match="does not know --new-flag 3"):
        translate(["--new-flag", "3"])


def test_a_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jinja").write_text("{{ messages }}")
    assert translate(["--chat-template", str(tmp_path / "a.jinja")]).chat_template == "{{ messages }}"
    assert translate(["--chat-template", "{{ x }}"]).chat_template == "{{ x }}"


def test_a_model_with_another_template_has_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").write_text("weights")
    (tmp_path / "model" / "chat_template.jinja").write_text("old")
    copy = with_changes(tmp_path / "model", tmp_path / "copy", "new")
    assert (copy / "chat_template.jinja").read_text() == "new"
    assert (copy / "model.safetensors").samefile(tmp_path / "model" / "model.safetensors")
    assert (tmp_path / "model" / "chat_template.jinja").read_text() == "old"


LINES = [
    {"test": "a/test_x.py::test_1", "outcome": "passed", "reason": ""},
    {"test": "a/test_x.py::test_2[a|b]", "outcome": "failed", "reason": "assert 1 == 2\n  where <x>"},
    {"test": "a/test_x.py::test_2[a|b]", "outcome": "passed", "reason": "the end of a fixture"},
    {"test": "b/test_y.py::test_3", "outcome": "skipped", "reason": "Skipped: not applicable: LoRA adapters"},
    {"test": "b/test_y.py::test_4", "outcome": "passed", "reason": ""},
    {"test": "b/test_y.py::test_4", "outcome": "failed", "reason": "the server did not end"},
]


def test_each_test_counts_once_by_the_worst_that_it_came_to() -> None:
    told = read_results(map(json.dumps, LINES)).as_json()
    assert (told["passed"], told["failed"], told["not_applicable"]) == (1, 2, 1)
    assert told["files"]["a/test_x.py"] == {"passed": 1, "failed": 1, "not_applicable": 0}
    assert told["failures"]["b/test_y.py::test_4"] == "the server did not end"


def test_the_tables_take_the_place_of_the_last_ones(tmp_path: Path) -> None:
    results = read_results(map(json.dumps, LINES))
    table = build_table(results, "1.2")
    assert "| `a/test_x.py` | 1 | 1 | 0 |" in table
    assert "| 1 | LoRA adapters |" in table
    assert "| `test_x.py::test_2[a\\|b]` | assert 1 == 2 where &lt;x> |" in table
    copy = tmp_path / "page.md"
    copy.write_text((REPOSITORY / "docs" / "peers-tests.md").read_text())
    for _ in range(2):
        page.write_table(copy, results, "1.2")
    assert copy.read_text().count("| LoRA adapters |") == 1


def test_the_page_shows_files_that_are_run() -> None:
    text = (REPOSITORY / "docs" / "peers-tests.md").read_text()
    shown = re.findall(r"^\| `([^`:]+\.py)` \| \d", text, re.MULTILINE)
    assert shown or "The command has not run as a whole yet." in text
    assert set(shown) <= set(FILES)
