"""Runs docs/measuring.md's command for the time from a request to the engine's replica."""

import pytest
from tests.bench.commands import run


@pytest.mark.slow
def test_it_can_start() -> None:
    """This only tests the start. tests/contract/test_zero.py tests what it measures. People run the measurement."""
    assert "--services" in run("wake", "--help")
