"""Tests that the table of attacks on keys names tests and rows of `make soak` that exist."""

import ast
import re

from conveyor_bench.hostile.gateway.attacks import CLIENTS
from conveyor_bench.hostile.gateway.keys import KEYS
from e2e.cluster.paths import REPOSITORY

PAGE = REPOSITORY / "docs" / "adr" / "0196-each-attack-on-keys-has-a-test.md"
WITHOUT_TEST = {"timing of the comparison"}  # no test asserts a time


def is_test(reference: str) -> bool:
    """Return whether `path::name` is a test function."""
    path, _, name = reference.partition("::")
    body = ast.parse((REPOSITORY / path).read_text()).body
    return name in {each.name for each in body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))}


def test_each_attack_on_keys_has_a_test_or_a_row_of_the_soak() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 15
    for attack, _, tests in rows:
        named = re.findall(r"`(tests/[^`]+)`", tests)
        soaked = re.findall(r"`make soak`: `(\w+)`", tests)
        assert not [each for each in named if not is_test(each)]
        assert {*soaked} <= CLIENTS.keys() | KEYS.keys()
        assert bool(named or soaked) == (attack.strip() not in WITHOUT_TEST), attack
