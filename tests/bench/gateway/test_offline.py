"""Runs docs/measuring.md's command for offline jobs."""

import json

import pytest
from tests.bench.commands import run


@pytest.mark.nightly
def test_live_requests_are_answered_beside_jobs() -> None:
    """Trains the demo's model if the cache lacks it."""
    result = json.loads(run("offline", "--rounds 1 --seconds 5").splitlines()[-1])
    assert list(result["live_seconds"]) == [
        "live alone", "beside a job of the same class", "beside a job of a lower class", "the same with maxShare: 50",
    ]  # fmt: skip
    assert all(figures["requests"] > 5 for figures in result["live_seconds"].values())
    assert all(count > 0 for count in result["job_per_second"].values())
