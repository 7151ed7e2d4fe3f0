"""Runs docs/measuring.md's command for hostile clients of gateway, metrics server and operator."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.nightly
def test_an_attack_is_measured() -> None:
    result = json.loads(run("hostile", "idle --seconds 1").splitlines()[-1])
    assert {bar["attack"] for bar in result["bars"]} == {"idle"}


@pytest.mark.nightly
def test_an_attack_is_compared_with_the_same_on_another_gateway() -> None:
    result = json.loads(run("hostile", "refusals --seconds 1").splitlines()[-1])
    assert [bar["name"] for bar in result["bars"]] == [
        "others' p50, ms",
        "others' p99, ms",
        "others' requests that failed",
        "others' p99 after 1 s, ms",
        "slowest probe or /demand, s",
    ]
