"""The commands of docs/measuring.md and docs/batching.md: the help, and each measurement with small sizes.

The figures mean nothing here. Measurements compare the systems' answers themselves before they measure.
"""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from conveyor_bench.__main__ import COMMANDS, main
from e2e.cluster.paths import REPOSITORY

TINY = "--model-shape tiny --dtype float32 --rounds 1"
SOON = f"{TINY} --budget-seconds 5"  # a busy host drops rounds, and each takes another one
ONE_BATCH = "--requests 3 --input-tokens 9 --output-tokens 5"
# (arguments, the mark of the time that they need). Others of `engine` install gigabytes.
QUICK = [
    (f"engine --compare hf-static {SOON} {ONE_BATCH} --profile", "slow"),
    (f"engine --compare overlap {SOON} {ONE_BATCH}", "slow"),
    (f"engine --compare hf-continuous {SOON} {ONE_BATCH}", "nightly"),
    (f"engine --workload B {SOON}", "nightly"),
    (f"engine --workload D {SOON}", "nightly"),
    (f"engine --workload E {SOON}", "nightly"),
    (f"engine --workload classify {SOON}", "slow"),
    (f"engine --workload image {SOON}", "slow"),
    (f"engine --workload see {SOON}", "slow"),
    (f"constrained {TINY} --rows 3 --tokens 12", "slow"),
    (f"speculation {TINY} --rows 1,2 --rounds 1", "slow"),
    (f"speculation {TINY} --draft-shape tiny --rows 1 --rounds 1 --right 1", "slow"),
    ("speculation --model {model} --dtype float32 --train-head 1 --rows 1 --rounds 1", "slow"),
    ("speculation-peers --systems conveyor --model-shape tiny --draft-shape tiny --cases edit --rounds 1", "slow"),
    (f"adapters {TINY} --rows 3 --prompt-tokens 8 --tokens 4 --adapters 2 --rank 2 --compare peft", "slow"),
    ("adapter-slots --model-shape tiny --adapters 4 --slots 2 --rank 2 --requests 20 --tokens 4 --rounds 2", "slow"),
    ("schemas tests/engine/text/schema/emitted --samples 2", "slow"),
    ("host --rows 3 --steps 4 --streamed-tokens 20", "slow"),
    ("start --model {model} --starts 1 --tokens 5", "nightly"),
    ("embed-modes --requests 40 --out {out} --pictures {out}", "slow"),
    ("paint-modes --rates 2 --pictures 2", "nightly"),
    ("paint-served --systems dynamic,continuous --pictures 4 --loads 0.5 --steps 2", "slow"),
    ("paint-modes --layout xl --loads 0.5 --pictures 2 --steps 1 2", "slow"),
    ("speech --shape tiny --rates 2 --files 2 --rounds 1", "nightly"),
    ("gateway --seconds 1 --requests-per-second 10 --streams 5 --events 5 --concurrency 2", "slow"),
    ("gateway-beside --against HEAD --rounds 2 --seconds 0.5", "slow"),
    ("traces --rounds 2 --seconds 0.3", "slow"),
    ("loop --services 200", "slow"),
    ("prefixes --rounds 1 --engines 2", "nightly"),
    ("overload --seconds 2 --tokens 50", "nightly"),
    ("fairness --virtual-only --virtual-seconds 10", "slow"),
    ("fairness --virtual-seconds 10 --rounds 1 --seconds 8", "nightly"),
    ("offline --rounds 1 --seconds 5", "nightly"),
    ("reconcile --services 8 --idle-seconds 1 --edit-seconds 2", "nightly"),
    ("wake --services 2", "nightly"),
    ("cycles --cycles 60", "nightly"),
    ("heavy-objects --deep 2 --wide 2 --fill 0.01", "nightly"),
    ("console --services 20 --pages 3 --seconds 1", "slow"),
    ("hostile idle refusals 'jobs of output bombs' --seconds 1", "nightly"),
    ("hostile-control edits --seconds 2 --services 20", "nightly"),
    ("hostile-engine nested --times 1 --seconds 1", "nightly"),
]
# With sentence-transformers, which `make test-oldest` brings.
BESIDE = [
    f"engine --workload embed {SOON}",
    f"engine --workload rerank {SOON}",
    "batchers --systems conveyor --shape tiny --rounds 1 --seconds 1 --requests 1 --threads 1 --out {out}/figures.json",
]
LINES_ONLY = {"embed-modes", "heavy-objects", "paint-modes", "speech"}
ELSEWHERE = {"gpu": "tests/bench/gpu", "modes": "tests/bench/modes", "objectives": "tests/bench/objectives"}


def measure(arguments: str, folder: Path) -> None:
    """Run a measurement. Its code may be 1, because figures may miss their bars here."""
    command = [
        sys.executable,
        "-m",
        "conveyor_bench",
        *shlex.split(arguments.format(out=folder, model=folder / "model")),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode in (0, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    *_, last = done.stdout.splitlines()
    assert command[3] in LINES_ONLY or json.loads(last)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, marks=getattr(pytest.mark, mark), id=" ".join(arguments.split()[:3]))
        for arguments, mark in QUICK
    ],
)
def test_a_measurement_runs(arguments: str, tmp_path: Path) -> None:
    if "{model}" in arguments:
        from tests.engine.chat_model import write_chat_model

        write_chat_model(tmp_path / "model")
    measure(arguments, tmp_path)


@pytest.mark.parametrize("arguments", BESIDE, ids=lambda arguments: " ".join(arguments.split()[:3]))
def test_a_measurement_beside_sentence_transformers_runs(arguments: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("sentence_transformers") is None:
        pytest.skip("needs sentence-transformers: make test-oldest")
    measure(arguments, tmp_path)


def test_each_measurement_is_run() -> None:
    run = {arguments.split()[0] for arguments in (*(each for each, _ in QUICK), *BESIDE)}
    assert run | ELSEWHERE.keys() == COMMANDS.keys()
    assert all((REPOSITORY / folder).is_dir() for folder in ELSEWHERE.values())


def test_help_lists_each_measurement_with_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["--help"])
    _, commands = capsys.readouterr().out.split("commands:\n")
    listed = dict(line.split(maxsplit=1) for line in commands.splitlines())
    assert listed == {name: command.help for name, command in COMMANDS.items()}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_measurement_has_help_of_its_own(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main([name, "--help"])
    assert f"usage: python -m conveyor_bench {name} [-h]" in capsys.readouterr().out


def test_the_page_has_the_claim_of_each_measurement() -> None:
    page = (REPOSITORY / "docs/measuring.md").read_text()
    _, _, after = page.partition("## What each measurement guards")
    rows = [line.split("|")[1] for line in after.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([a-z-]+)`", row)]
    assert sorted(named) == sorted(COMMANDS)
