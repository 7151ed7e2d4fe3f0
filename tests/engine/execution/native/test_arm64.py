"""The CPU kernels, compiled for arm64 and run under qemu-user, compute what the same C computes on this machine."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
CROSS = Path("/usr/aarch64-linux-gnu")  # Debian's
NAMES = ["linear", "rms_norm", "silu_mul", "rope", "attention", "sample"]


def build(folder: Path, compiler: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compile the library and the program that runs its kernels. Returns the program."""
    monkeypatch.setenv("CC", compiler)
    folder.mkdir()
    compile_library = runpy.run_path(str(REPOSITORY / "engine" / "native" / "compile.py"))["compile_library"]
    library = compile_library(folder / "libconveyor.so")
    source = Path(__file__).with_name("arm64_check.c")
    program = folder / "check"
    include = f"-I{REPOSITORY / 'engine' / 'native' / 'src'}"
    subprocess.run([compiler, "-O1", include, source, library, "-fopenmp", "-lm", "-o", program], check=True)
    return program


def run(*command: str | Path, folder: Path) -> dict[str, list[float]]:
    environment = {"LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    return {name: [float(number) for number in numbers] for name, *numbers in lines}


@pytest.mark.nightly
@pytest.mark.skipif(
    not all(map(shutil.which, ("aarch64-linux-gnu-gcc", "qemu-aarch64-static"))),
    reason="needs Debian's crossbuild-essential-arm64 and qemu-user-static: make arm64",
)
def test_kernels_compute_the_same_on_arm64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arm64 = build(tmp_path / "arm64", "aarch64-linux-gnu-gcc", monkeypatch)
    here = build(tmp_path / "here", "cc", monkeypatch)
    emulator = ("qemu-aarch64-static", "-L", CROSS, arm64)
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 2e-2)):
        found = run(*emulator, dtype, folder=arm64.parent)
        expected = run(here, dtype, folder=here.parent)
        assert list(found) == list(expected) == NAMES
        for name in NAMES:
            assert any(expected[name]), name
            assert found[name] == pytest.approx(expected[name], rel=tolerance, abs=tolerance), name
