"""Tests the small command `waits` of docs/measuring.md: its last line, and that no request waits for all of a list."""

import json

import pytest

from conveyor_bench.engine import waits


def test_one_request_waits_for_about_a_batch_of_somebody_elses(capsys: pytest.CaptureFixture[str]) -> None:
    assert waits.main(["--inputs", "100", "--choices", "70"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result) == ["inputs continuous", "inputs dynamic", "choices continuous"]
    for figures in result.values():
        assert figures["ended_before"] <= 2 * 32
        assert min(figures["wait_seconds"], figures["alone_seconds"]) > 0


@pytest.mark.parametrize("flag", ["--inputs", "--choices"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        waits.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err
