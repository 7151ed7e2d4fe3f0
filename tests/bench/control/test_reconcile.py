"""Runs docs/measuring.md's command for the operator's reconciles."""

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_it_can_start() -> None:
    """This only tests the start, because two services already take half a minute. People run the measurement."""
    assert "--services" in run("reconcile", "--help")
