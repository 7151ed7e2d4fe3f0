"""Tests the engine's command of docs/measuring.md with a tiny model: its last line, and what it refuses."""

import json

import pytest

from conveyor_bench.comparing import limit, slices, turns
from conveyor_bench.engine import command as bench
from conveyor_bench.peers import hf_continuous


@pytest.fixture(autouse=True)
def _a_host_that_takes_nothing_and_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "processor_ticks", lambda: [0] * 8)
    monkeypatch.setattr(slices, "SLICE_SECONDS", 3600.0)
    monkeypatch.setattr(limit, "processor_ticks", lambda: [0] * 8)
    monkeypatch.setattr(limit, "PASSES_SECONDS", 0.0)


def test_the_last_line_is_one_json_object_with_the_ratio_to_the_peer(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "3", "--input-tokens", "9", "--output-tokens", "5", "--rounds", "2"]
    assert bench.main([*sizes, "--compare", "hf-static", "--profile"]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    peer = result["peers"]["hf-static"]
    assert [peer["phases"][phase]["pairs"] for phase in ("prefill", "decode")] == [1, 1]
    phases = sorted(peer["phases"][phase]["ratio"] for phase in ("prefill", "decode"))
    assert phases[0] <= peer["ratio"] <= phases[1]
    assert (result["slices"], result["dropped"]) == ({"conveyor": 2, "hf-static": 2}, {"conveyor": 0, "hf-static": 0})
    assert result["settled"] is False, "after two rounds"
    assert [len(values) for values in result["rounds"].values()] == [2, 2]
    assert result["same_float32_tokens_as_transformers"] is True
    assert any("tokens_equal" in line for line in lines)
    assert any("hf-static_gap=" in line for line in lines)
    fractions = sorted(result["limit"]["fractions"].values())
    assert fractions[0] <= result["limit_fraction"] <= fractions[1]
    assert any("limit_fraction" in line for line in lines[:-1])
    assert list(result["profile"]) == ["prefill", "decode"]
    assert all(sum(told["shares"].values()) == pytest.approx(1, abs=0.01) for told in result["profile"].values())


@pytest.mark.slow
def test_continuous_batching_of_transformers_is_a_peer_whose_tokens_are_checked_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "3", "--input-tokens", "9", "--output-tokens", "5", "--rounds", "1"]
    assert bench.main([*sizes, "--compare", "hf-continuous"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["peers"]["hf-continuous"]["phases"]["decode"]["pairs"] == 1
    right = hf_continuous._generate
    monkeypatch.setattr(hf_continuous, "_generate", lambda *a: [[t ^ 1 for t in row] for row in right(*a)])
    with pytest.raises(SystemExit, match="tokens differ from hf-continuous"):
        bench.check_tokens({"hf-continuous": bench.PEERS["hf-continuous"]})


def test_an_engine_whose_steps_run_ahead_is_a_peer_too(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model-shape", "tiny", "--requests", "3", "--input-tokens", "9", "--output-tokens", "5", "--rounds", "1"]
    assert bench.main([*sizes, "--compare", "overlap"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(result["rounds"]) == ["conveyor", "overlap"]


def test_a_difference_in_the_tokens_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    right = bench.HfStatic.generate
    monkeypatch.setattr(bench.HfStatic, "generate", lambda *a: [[t ^ 1 for t in row] for row in right(*a)])
    with pytest.raises(SystemExit, match="tokens differ"):
        bench.check_tokens({"hf-static": bench.HfStatic})


@pytest.mark.parametrize("flag", ["--requests", "--rounds", "--input-tokens"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err
