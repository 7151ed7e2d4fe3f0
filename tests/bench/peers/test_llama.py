"""llama.cpp gives transformers' tokens from the file that is written for it. Its build takes too long for the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conveyor_bench.comparing import checks
from conveyor_bench.comparing.systems import write_model
from conveyor_bench.comparing.turns import random_prompts
from conveyor_bench.engine.command import PEERS
from conveyor_bench.peers import process

PEER = PEERS["llama.cpp"]


@pytest.fixture(autouse=True)
def _is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    if "UV" not in os.environ:
        cache = Path(os.environ.get("CONVEYOR_CACHE") or Path.home() / ".cache" / "conveyor")
        monkeypatch.setenv("PATH", os.pathsep.join([*map(str, cache.glob("uv-*/bin")), os.environ["PATH"]]))
    script = process.cached(Path(process.__file__).parent / "run_llama.py")
    asked = ("sync", "--quiet", "--offline", "--check", "--python", sys.executable, "--script", script)
    try:
        found = subprocess.run([process.find_uv(), *asked], capture_output=True).returncode == 0
    except SystemExit:
        found = False
    if not found:
        pytest.skip("needs llama.cpp: `uv run --no-sync python -m conveyor_bench engine --compare llama.cpp` builds it")


def test_its_float32_tokens_are_ours_and_transformers() -> None:
    assert checks.check_tokens({"hf-static": PEERS["hf-static"], "llama.cpp": PEER}) == (256, 138)


def test_its_bfloat16_tokens_are_right_as_far_as_rounding_goes(tmp_path: Path) -> None:
    write_model(tmp_path, "tiny", torch.bfloat16)
    prompts = random_prompts(3, (9, 30), 1000, 1)
    gaps = checks.check_gaps(tmp_path, {"llama.cpp": PEER(tmp_path, "bfloat16")}, prompts, 8)
    assert gaps["llama.cpp"] < checks.GAP_AT_MOST
