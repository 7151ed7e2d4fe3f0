"""Tests the command `gpu` of docs/measuring.md on the CPU. Each stage runs, even if few packages are installed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.bench.gpu.few_packages import hide_all_but
from torch import nn

from conveyor_bench.gpu import suite
from conveyor_bench.gpu.device import Ceilings
from conveyor_bench.gpu.results import Results
from conveyor_bench.gpu.stages import STAGES
from conveyor_bench.gpu.table import write_tables
from conveyor_bench.gpu.trace import Interval, find_gaps, sum_by_gap, sum_by_kernel, summarise
from conveyor_bench.gpu.workloads import least_seconds

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


def test_a_missing_package_is_named_before_any_stage_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suite.importlib.util, "find_spec", lambda name: None if name == "msgspec" else name)
    with pytest.raises(SystemExit, match=r"^2$"):
        suite.main(["--rehearse", "--out", str(tmp_path / "out")])
    assert "not installed: msgspec" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


TRACE = [
    Interval("a", 0, 10),
    Interval("b", 4, 6),
    Interval("Memcpy DtoH", 15, 20),
    Interval("a", 22, 30),
    Interval("Memcpy DtoH", 30, 40),
]


def test_gaps_are_where_nothing_runs() -> None:
    assert [(gap.before.name, gap.length) for gap in find_gaps(TRACE)] == [("a", 5), ("Memcpy DtoH", 2)]
    told = summarise(TRACE, 2)
    assert (told["device_ms"], told["idle"], told["between_steps_us"]) == (0.02, 7 / 40, 2)
    assert told["between_steps"] == 2 / 40
    assert [row["us"] for row in sum_by_kernel(TRACE, 2)] == [9, 7.5, 1]
    assert [row["us"] for row in sum_by_gap(find_gaps(TRACE), 2)] == [2.5, 1]


def test_the_least_time_reads_each_weight_in_each_step_of_decodes() -> None:
    """One layer of 2 x 3 weights and a head of 2 x 5, one KV head of 4: two bytes each."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(2, 3), nn.Linear(2, 5)
            self.dtype = dataclasses.make_dataclass("Dtype", [("itemsize", int)], frozen=True)(2)
            self.config = self

        num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim = 1, 1, 1, 4

        def get_text_config(self) -> "Model":
            return self

        def get_output_embeddings(self) -> nn.Linear:
            return self.head

    by_bytes, by_flops = Ceilings(1.0, 1e9), Ceilings(1e9, 1.0)
    prompts, decodes = least_seconds(Model(), [(3, 3), (1, 2)], by_bytes)  # type: ignore[arg-type]
    assert decodes == (16 * 2 + 16 * (4 + 2)) + (16 * 2 + 16 * 5), "two rows with a second token, one with a third"
    prompts, _ = least_seconds(Model(), [(3, 3), (1, 2)], by_flops)  # type: ignore[arg-type]
    assert prompts == 2 * 6 * 4 + 2 * 10 * 2 + 2 * 4 * (9 + 1)


def test_tables_have_the_columns_of_all_their_rows() -> None:
    lines = [
        {"about": {"device": "x"}},
        {"table": "t", "a": 0.123456, "b": "p|q"},
        {"table": "t", "a": 12345.6, "c": None},
        {"end": "done", "seconds": 1.5},
    ]
    assert write_tables({"nano": lines, "one": []}).splitlines() == [
        "### nano",
        "device x. Stage: done, 1.5 s.",
        "",
        "t:",
        "",
        "| a | b | c |",
        "| --- | --- | --- |",
        "| 0.1235 | p\\|q | – |",
        "| 12,346 | – | – |",
    ]
