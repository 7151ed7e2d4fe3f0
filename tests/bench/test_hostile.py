"""Hostile clients of gateway, metrics server and operator, by docs/benchmarks.md's command."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_an_attack_is_measured() -> None:
    result = json.loads(run("hostile.py", "idle --seconds 1").splitlines()[-1])
    assert {bar["attack"] for bar in result["bars"]} == {"idle"}
