"""Runs docs/measuring.md's command for a hostile tenant of the operator and the metrics server."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.nightly
def test_an_attack_is_compared_with_the_same_on_what_is_not_ours() -> None:
    result = json.loads(run("hostile-control", "edits --seconds 2").splitlines()[-1])
    assert {bar["attack"] for bar in result["bars"]} == {"edits"}
    (failed,) = [bar for bar in result["bars"] if bar["name"] == "the HPA's values that failed"]
    assert failed["beside"] == 0
