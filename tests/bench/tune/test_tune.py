"""`python -m conveyor_bench tune` of docs/tuning.md: real engine processes, one for each setting."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engine.chat_model import write_chat_model

from conveyor_bench.__main__ import main
from e2e.cluster.paths import REPOSITORY

COMMANDS = re.findall(r"```sh\n\S*python (-m conveyor_bench tune .*)\n```", (REPOSITORY / "docs/tuning.md").read_text())
QUICK = ["--rate=4", "--seconds=2", "--input-tokens=16", "--output-tokens=4", "--max-batch-size=4"]
ENGINE = ["--", "--device=cpu", "--dtype=float32", "--num-kv-blocks=1024"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "tiny")


def write_trace(path: Path) -> Path:
    rows = [{"timestamp": 200 * number, "input_length": 16, "output_length": 4} for number in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def start(*arguments: str | Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "conveyor_bench", "tune", *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_the_documented_command_measures_each_setting(model: Path, tmp_path: Path) -> None:
    (documented,) = COMMANDS
    words = shlex.split(documented)[3:]
    assert words[:3] == ["--model", "./model", "--trace"]
    words[1], words[3] = str(model), str(write_trace(tmp_path / "trace.jsonl"))
    given = words[: words.index("--")] if "--" in words else words
    process = start(*given, *QUICK, "--objective=latency=30s", "-o", "json", *ENGINE)
    out, error = process.communicate(timeout=280)
    assert process.returncode == 0, error
    told = json.loads(out)
    assert [each["batching"] for each in told["candidates"]] == [{"maxBatchSize": 32}, {"maxBatchSize": 4}]
    for candidate in told["candidates"]:
        (trial,) = candidate["trials"]
        assert trial["requests"] in (8, 9)
        assert (trial["failed"], trial["misses"]) == (0, [])
        assert trial["outputTokensPerSecond"] > 0


@pytest.mark.slow
def test_a_signal_ends_the_engine_too(model: Path) -> None:
    process = start("--model", model, *QUICK, "--seconds=600", "--objective=latency=30s", *ENGINE)
    assert process.stderr is not None
    for line in process.stderr:
        if "4 requests/s" in line:
            break
    (engine,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130, told
    assert not Path(f"/proc/{engine}").exists()


@pytest.mark.slow
def test_a_setting_that_does_not_start_says_why(model: Path) -> None:
    process = start("--model", model, *QUICK, "--objective=latency=30s", "--", "--device=cpu", "--num-kv-blocks=1")
    out, _ = process.communicate(timeout=280)
    assert process.returncode == 1
    assert "does not run: the engine ended: " in out
    assert "num_kv_blocks" in out
    assert "No setting runs, so there is nothing to recommend." in out


def test_what_cannot_be_tuned_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for flags, words in (
        (["--model", str(tmp_path), "--window=5ms"], "mode Continuous has no window"),
        (["--model", str(tmp_path), f"--trace={tmp_path / 'nowhere'}"], "No such file"),
    ):
        assert main(["tune", *flags, "--objective=latency=1s"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("python -m conveyor_bench tune: ")
        assert words in line
