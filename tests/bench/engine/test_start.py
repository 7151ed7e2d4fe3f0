"""Tests the command `start` of docs/measuring.md with small sizes: its last line, and what it refuses."""

import json
import os
from pathlib import Path

import pytest
from tests.engine.chat_model import write_chat_model

from conveyor_bench.engine import start


@pytest.mark.slow
def test_the_last_line_is_one_json_object_with_the_parts_of_a_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    processors = os.sched_getaffinity(0)
    model = write_chat_model(tmp_path)
    assert start.main(["--model", str(model), "--starts", "1", "--tokens", "5"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    parts = {name: figures["median"] for name, figures in told.items()}
    streamed, whole = parts.pop("streamed_tokens_per_second"), parts.pop("all")
    assert list(parts) == ["api_process", "imports", "model", "warm_up"]
    assert whole == pytest.approx(sum(parts.values()), abs=0.003)
    assert min(streamed, *parts.values()) > 0
    assert os.sched_getaffinity(0) == processors


def test_a_model_that_cannot_be_served_is_told(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="so it has no model"):
        start.measure_start(str(tmp_path / "none"), os.sched_getaffinity(0), 1, 1)


@pytest.mark.parametrize("flag", ["--processors", "--starts", "--streams", "--tokens"])
def test_sizes_below_one_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start.main(["--model", "none", flag, "0"])
    assert f"{flag} must be at least 1" in capsys.readouterr().err


def test_more_processors_than_there_are_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start.main(["--model", "none", "--processors", "100000"])
    assert "--processors must be at most" in capsys.readouterr().err
