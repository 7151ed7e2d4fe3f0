"""Objectives on this machine: a real model, and the same comparison as in virtual time."""

import re

import pytest

from conveyor_bench.objectives import command, measured
from conveyor_bench.objectives.measured import FIXED
from conveyor_bench.objectives.shapes import SHAPES, Scale, draw_requests


@pytest.mark.nightly
def test_the_command_runs_every_shape_with_each_limit_and_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = FIXED[::4]
    monkeypatch.setattr(measured, "FIXED", fixed)
    assert command.main(["--measured", "--seconds", "0.5"]) in (0, 1), "so short a run may miss"
    told = capsys.readouterr().out
    runs = len(SHAPES) * (len(fixed) + 1)
    assert re.findall(r"run=(\d+)/(\d+) ", told) == [(str(run), str(runs)) for run in range(1, runs + 1)]
    assert re.findall(r"^shape=(\w+) p95_of_objective=\d", told, re.MULTILINE) == list(SHAPES)


def test_a_burst_is_bounded_by_the_length_of_a_run() -> None:
    assert [count_at_once(seconds) for seconds in (2.0, 100.0)] == [16, 400]


def count_at_once(seconds: float) -> int:
    requests = draw_requests(SHAPES["burst"], Scale(10.0, seconds), 1, 100)
    return sum(request.arrival_time == seconds / 5 for request in requests)
