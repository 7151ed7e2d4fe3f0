"""Runs docs/measuring.md's commands for homes of prefixes."""

import json

import pytest
from tests.bench.commands import run


def test_homes_are_compared_in_virtual_time() -> None:
    results = json.loads(run("homes", "--seconds 20 --engines 2").splitlines()[-1])["results"]
    assert len(results) == 14
    assert (
        results["documents, 250 users, 1.5 x load, 0.5 s"]["cached"]
        > results["documents, 250 users, load only"]["cached"]
    )
    assert all(each["cached"] == 0 for name, each in results.items() if name.startswith("single"))


@pytest.mark.nightly
def test_two_gateways_share_real_engines() -> None:
    """Trains the demo's model if the cache lacks it."""
    kinds = json.loads(run("prefixes", "--rounds 1 --engines 2").splitlines()[-1])["kinds"]
    assert list(kinds) == ["conversations", "documents", "single"]
    for kind, sides in kinds.items():
        assert list(sides) == ["homes", "load only"]
        assert all(side["requests_per_second"] > 0 for side in sides.values()), kind
        assert all(0 <= side["cached"] < 1 for side in sides.values()), kind
