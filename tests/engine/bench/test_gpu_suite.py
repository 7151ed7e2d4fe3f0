"""`bench --suite gpu` of docs/benchmarks.md, rehearsed on the CPU: every stage runs, whatever little is installed."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.bench.few_packages import hide_all_but
from torch import nn

from conveyor_engine.__main__ import main
from conveyor_engine.bench.gpu import suite
from conveyor_engine.bench.gpu.device import Ceilings
from conveyor_engine.bench.gpu.results import Results
from conveyor_engine.bench.gpu.stages import STAGES
from conveyor_engine.bench.gpu.table import write_tables
from conveyor_engine.bench.gpu.trace import Interval, find_gaps, sum_by_gap, sum_by_kernel, summarise
from conveyor_engine.bench.gpu.workloads import least_seconds

REHEARSAL = "python -m conveyor_engine bench --suite gpu --rehearse"


def rehearse(out: Path, *options: str, **environment: str) -> str:
    """What the command prints. Byte code is kept, or each stage would compile torch and transformers anew."""
    command = [sys.executable, *REHEARSAL.split()[1:], "--out", str(out), *options]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    ran = subprocess.run(command, env=kept | environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_torch_triton_transformers_and_pytest_are_enough_for_all_stages_but_http(tmp_path: Path) -> None:
    hidden = hide_all_but(tmp_path, {"torch", "triton", "transformers", "pytest"})
    assert {"msgspec", "greenlet", "fastapi", "hypothesis"} <= hidden
    rehearse(tmp_path, PYTHONPATH=str(tmp_path))
    results = {name: Results(tmp_path, name) for name in STAGES}
    assert {name: result.how() for name, result in results.items()} == dict.fromkeys(STAGES, "done") | {
        "http": "skipped"
    }
    assert results["http"].read()[-1]["reason"].startswith("not installed: fastapi, httptools, msgspec")
    lines = [line for result in results.values() for line in result.read()]
    assert not [line for line in lines if "error" in line]
    assert all(line["about"]["msgspec"] == "plain dataclasses" for line in lines if line.get("about"))
    page = (tmp_path / "gpu.md").read_text()
    assert all(f"### {name}\n" in page for name in STAGES)
    assert rehearse(tmp_path, "--stage", "nano").count("event=stage_kept name=nano") == 1, "it is done"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_streams_are_rehearsed_where_the_server_is_installed(tmp_path: Path) -> None:
    rehearse(tmp_path, "--stage", "http")
    assert [line["requests"] for line in Results(tmp_path, "http").read() if "table" in line] == [4, 4]


def test_a_stage_ends_at_its_limit_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    short = {name: dataclasses.replace(STAGES[name], limit_seconds=0.2) for name in ("nano", "one")}
    monkeypatch.setattr(suite, "STAGES", short)
    assert main(["bench", "--suite", "gpu", "--rehearse", "--out", str(tmp_path)]) == 1
    assert [Results(tmp_path, name).how() for name in short] == ["timed out"] * 2
    capfd.readouterr()
    assert main(["bench", "--suite", "gpu", "--list", "--out", str(tmp_path)]) == 0
    assert capfd.readouterr().out.count(" timed out ") == 2


def test_a_stage_without_a_gpu_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", "--suite", "gpu", "--stage", "nano", "--out", str(tmp_path)]) == 1
    last = Results(tmp_path, "nano").read()[-1]
    assert last["end"] == "failed"
    assert "no CUDA device is visible" in last["reason"]


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
            self.dtype = dataclasses.make_dataclass("Dtype", [("itemsize", int)])(2)
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
