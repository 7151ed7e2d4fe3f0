"""Tests how the compiled kernels use AMX, executed in software on CPUs with only AVX512 (`amx_emulator.py`)."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from conveyor_engine.execution import native

ROOT = Path(__file__).resolve().parents[4]
EXECUTION = "tests/engine/execution"
MODELS = (f"{EXECUTION}/models/test_fuse.py", f"{EXECUTION}/models/test_last_layer.py")


def _why_not() -> str | None:
    if reason := native.why_missing():
        return f"needs the compiled kernels: {reason}"
    best = native.isa()
    if best == "amx":
        return "this CPU has AMX: the tests of `amx` run by themselves"
    if best != "avx512bf16":
        return "the kernels that use AMX use AVX512-BF16 too, which this CPU or this build lacks"
    if not shutil.which(os.environ.get("CC", "cc")) or not shutil.which("nm"):
        return "needs a C compiler, and nm"
    return None


@pytest.mark.nightly
def test_kernels_and_models_pass_their_tests_with_tiles() -> None:
    if reason := _why_not():
        pytest.skip(reason)
    plugins = (f"{EXECUTION.replace('/', '.')}.native.amx_emulator", "no:faulthandler", "no:cacheprovider")
    chosen = ("-k", "amx or bfloat16 and native or last_layer", f"{EXECUTION}/native", *MODELS)
    command = [sys.executable, "-m", "pytest", "-q", *(f"-p{name}" for name in plugins), *chosen]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr
    counts = re.search(r"emulated products of tiles: (\d+), threads that kept tiles: (\d+)", ran.stdout)
    assert counts is not None, ran.stdout
    assert int(counts[1]) > 30_000, "products that were to be by tiles were not"
    assert int(counts[2]) == 0
    assert "skipped" not in ran.stdout.splitlines()[-1]
