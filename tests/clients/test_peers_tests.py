"""vLLM's own tests against the engine: how its arguments become settings, and how results become tables."""

import json
import re
from pathlib import Path

from e2e.cluster.paths import REPOSITORY
from e2e.peers_tests import page
from e2e.peers_tests.arguments import translate
from e2e.peers_tests.files import FILES
from e2e.peers_tests.page import build_table, read_results


def test_arguments_with_a_setting_keep_their_value_and_parsers_are_off_unless_named() -> None:
    words = ["--enforce-eager", "--max-model-len", "2048", "--port=9", "--no-enable-prefix-caching"]
    assert translate(words).settings == [
        *("--max-model-len", "2048", "--port", "9", "--prefix-caching", "false"),
        *("--tool-parser", "none", "--reasoning-parser", "none"),
    ]
    named = translate(["--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"])
    assert named.settings == ["--tool-parser", "hermes", "--reasoning-parser", "think"]


LINES = [
    {"test": "a/test_x.py::test_1", "outcome": "passed", "reason": ""},
    {"test": "a/test_x.py::test_2[a|b]", "outcome": "failed", "reason": "assert 1 == 2\n  where <x>"},
    {"test": "a/test_x.py::test_2[a|b]", "outcome": "passed", "reason": "the end of a fixture"},
    {"test": "b/test_y.py::test_3", "outcome": "skipped", "reason": "Skipped: not applicable: LoRA adapters"},
    {"test": "b/test_y.py::test_4", "outcome": "passed", "reason": ""},
    {"test": "b/test_y.py::test_4", "outcome": "failed", "reason": "the server did not end"},
]


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
