"""The operator's reconciles, by docs/measuring.md's command."""

from tests.bench.commands import run


def test_it_can_start() -> None:
    """No more: with two services it takes half a minute already. Its figures are taken by hand."""
    assert "--services" in run("reconcile", "--help")
