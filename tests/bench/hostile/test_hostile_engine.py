"""Runs docs/measuring.md's command for a hostile client of an engine."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.nightly
def test_an_attack_is_measured() -> None:
    rows = json.loads(run("hostile-engine", "nested --times 1 --seconds 1").splitlines()[-1])
    assert [row["attack"] for row in rows] == ["nested"]
