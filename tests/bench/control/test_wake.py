"""The time from a request to the engine that is asked for, by docs/measuring.md's command."""

from tests.bench.commands import run


def test_it_can_start() -> None:
    """No more: what it measures is tried in tests/contract/test_zero.py. Its figures are taken by hand."""
    assert "--services" in run("wake", "--help")
