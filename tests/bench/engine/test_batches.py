"""Tests the small command `batches` of docs/benchmarks.md: its last line, and that grouping saves padding."""

import json

import pytest

from conveyor_bench.engine import batches


def test_grouping_saves_padding_and_each_task_has_both_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert batches.main(["--requests", "64", "--rounds", "1", "--model-shape", "tiny", "--alone", "3"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    padding = result["grouping"]["padding_share"]
    assert 0 <= padding["auto"] < padding["off"] < 1
    assert list(result["eager"]) == ["embed", "rerank", "classify"]
    assert all(figures["window"] >= 10 for figures in result["eager"].values()), "the default window of 10 ms"


@pytest.mark.parametrize("flag", ["--requests", "--rounds", "--alone"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        batches.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err
