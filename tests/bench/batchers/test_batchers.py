"""Tests `make batchers` of docs/measuring.md with only this engine and a tiny model.

The peers are not installed here.
"""

import asyncio
import json
from pathlib import Path
from random import Random

import pytest

from conveyor_bench.batchers import command
from conveyor_bench.batchers.client import Answer, draw_text, summarise
from conveyor_bench.batchers.server import Absent, running
from conveyor_bench.batchers.systems import SYSTEMS, Settings, System

QUICK = ["--systems", "conveyor", "--shape=tiny", "--rounds=1", "--seconds=1", "--requests=1", "--threads=1"]
SETTINGS = Settings(Path("model"), 32, 0.01)


def test_figures_are_of_all_requests() -> None:
    """Ten requests are due at once and end one second after the other. Another one has no answer."""
    answers = [Answer(0.0, float(number)) for number in range(1, 11)] + [Answer(0.0)]
    figures = summarise(answers, 4.0)
    assert figures == {
        "requests_per_second": 1.0,
        "within_objective": pytest.approx(4 / 11),
        "answered": pytest.approx(10 / 11),
        "p50": 5000.0,
        "p95": 10000.0,
        "p99": 10000.0,
    }
    assert summarise([Answer(0.0)], 4.0) == {"requests_per_second": 0.0, "within_objective": 0.0, "answered": 0.0}


def test_each_system_is_asked_in_its_own_shape_and_read_in_it() -> None:
    vector = [0.5, -0.5]
    answers = {
        "conveyor": {"data": [{"embedding": vector}]},
        "infinity": {"data": [{"embedding": vector}]},
        "triton": {"outputs": [{"data": vector}]},
        "bentoml": [vector],
    }
    for system in SYSTEMS:
        path, fields = system.ask("a text")
        assert path.startswith("/")
        assert "a text" in json.dumps(fields)
        assert system.read(answers.get(system.name, vector)) == vector


@pytest.mark.parametrize(("program", "why"), [("false", "ended with code 1"), ("sleep", "no answer within")])
def test_a_system_that_does_not_start_is_absent(
    program: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(System, "command", lambda *_: [program, "60"])
    monkeypatch.setattr("conveyor_bench.batchers.server._START_SECONDS", 1.0)

    async def start() -> None:
        async with running(SYSTEMS[1], SETTINGS, 1, [("a", [0.0])], tmp_path / "log"):
            pass

    with pytest.raises(Absent, match=why):
        asyncio.run(start())


def test_a_round_measures_every_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-oldest")
    out = tmp_path / "batchers.json"
    assert command.main([*QUICK, f"--out={out}"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads(out.read_text()) == told
    assert list(told["loads"]) == ["30%", "60%", "90%", "120%", "saturated"]
    assert told["absent"] == {}
    for systems in told["loads"].values():
        assert systems["conveyor"]["answered"] == 1.0
        assert 0 < systems["conveyor"]["p50"] <= systems["conveyor"]["p99"]


def test_a_system_whose_vectors_differ_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sentence_transformers", reason="needs sentence-transformers: make test-oldest")
    right = command.compute_right
    monkeypatch.setattr(
        command, "compute_right", lambda model: [(text, [x + 0.01 for x in vector]) for text, vector in right(model)]
    )
    with pytest.raises(SystemExit, match=r"no system answers here: conveyor: its vectors differ"):
        command.main([*QUICK, f"--out={tmp_path / 'batchers.json'}"])


def test_a_text_has_the_tokens_that_were_asked_for() -> None:
    assert len(draw_text(Random(0), 512).split()) == 510
