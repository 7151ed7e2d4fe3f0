"""Tests the command `gpu` of docs/measuring.md on the CPU. Each stage runs, even if few packages are installed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.bench.gpu.few_packages import hide_all_but

from conveyor_bench.gpu import suite
from conveyor_bench.gpu.gpu_tests import FILES, FILES_OF_TASKS, FOLDER
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.stages import STAGES

REHEARSAL = "python -m conveyor_bench gpu --rehearse"


def rehearse(out: Path, *options: str, **environment: str) -> str:
    """Return the command's output.

    Byte code is kept; otherwise each stage would compile torch and transformers again.
    """
    command = [sys.executable, *REHEARSAL.split()[1:], "--out", str(out), *options]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_few_packages_are_enough_for_all_stages_but_two(tmp_path: Path) -> None:
    hidden = hide_all_but(tmp_path, {"torch", "triton", "transformers", "msgspec", "pytest", "pillow"})
    assert {"greenlet", "fastapi", "hypothesis"} <= hidden
    rehearse(tmp_path, PYTHONPATH=str(tmp_path))
    results = {name: Results(tmp_path, name) for name in STAGES}
    skipped = dict.fromkeys(("http", "tasks"), "skipped")
    assert {name: result.how() for name, result in results.items()} == dict.fromkeys(STAGES, "done") | skipped
    assert results["http"].read()[-1]["reason"].startswith("not installed: fastapi, httptools, prometheus_client")
    lines = [line for result in results.values() for line in result.read()]
    assert not [line for line in lines if "error" in line]
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"### {name}\n" in page for name in STAGES)
    assert rehearse(tmp_path, "--stage", "nano").count("event=stage_kept name=nano") == 1, "it is done"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_streams_are_rehearsed_where_the_server_is_installed(tmp_path: Path) -> None:
    rehearse(tmp_path, "--stage", "http")
    rows = [(line["table"], line["requests"]) for line in Results(tmp_path, "http").read() if "table" in line]
    assert rows == [("engine alone", 4)] * 2 + [("streams", 4)] * 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_tests_of_other_tasks_are_rehearsed_where_their_packages_are_installed(tmp_path: Path) -> None:
    rehearse(tmp_path, "--stage", "tasks")
    (counts,) = [line for line in Results(tmp_path, "tasks").read() if line.get("table") == "tests"]
    assert counts["passed"] >= 2
    assert counts["failed"] == 0


@pytest.mark.parametrize("file", FILES + FILES_OF_TASKS)
def test_the_tests_that_a_gpu_runs_exist(file: str) -> None:
    assert (Path(__file__).parents[3] / FOLDER / file).is_file()


def test_a_stage_ends_at_its_limit_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {name: dataclasses.replace(STAGES[name], limit_seconds=0.2) for name in ("nano", "one")}
    monkeypatch.setattr(suite, "STAGES", short)
    assert suite.main(["--rehearse", "--out", str(tmp_path)]) == 1
    assert [Results(tmp_path, name).how() for name in short] == ["timed out"] * 2
    capfd.readouterr()
    assert suite.main(["--list", "--out", str(tmp_path)]) == 0
    assert capfd.readouterr().out.count(" timed out ") == 2


@pytest.mark.slow
def test_a_stage_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert suite.main(["--stage", "nano", "--out", str(tmp_path)]) == 1
    last = Results(tmp_path, "nano").read()[-1]
    assert last["end"] == "failed"
    assert "no CUDA device is visible" in last["reason"]
