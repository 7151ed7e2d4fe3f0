"""Checks that torch's library loader and Triton find a driver that a node mounts into the image without ldconfig.

The driver is a library with one function, in the folder that the environment of engine/Dockerfile names.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
GKE_FOLDER = "/usr/local/nvidia/lib64"
COMPILER = shutil.which("cc")

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="this machine has a driver")


def image_environment() -> dict[str, str]:
    """Return the environment variables of the image's last stage."""
    last_stage = (ROOT / "engine/Dockerfile").read_text().replace("\\\n", " ").rpartition("\nFROM ")[2]
    return dict(re.findall(r"(\w+)=(\S+)", " ".join(re.findall(r"^ENV (.*)$", last_stage, re.M))))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the image's library search path, with a folder of this machine in place of the node's folder."""
    if COMPILER is None:
        pytest.skip("needs a C compiler")
    source, driver = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuInit(unsigned flags) { return 802; }")
    subprocess.run([COMPILER, "-shared", "-fPIC", "-o", driver, source], check=True)
    path = image_environment()["LD_LIBRARY_PATH"].replace(GKE_FOLDER, str(tmp_path))
    return {**os.environ, "LD_LIBRARY_PATH": path}


def run(code: str, environment: dict[str, str]) -> str:
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr


def test_triton_finds_the_driver(environment: dict[str, str], tmp_path: Path) -> None:
    code = "from triton.backends.nvidia.driver import libcuda_dirs; print(*libcuda_dirs())"
    assert run(code, environment) == str(tmp_path)


@pytest.mark.slow
def test_an_engine_finds_the_driver_and_reports_that_it_does_not_start(environment: dict[str, str]) -> None:
    code = (
        "from conveyor_engine.errors import ConfigError\n"
        "from conveyor_engine.execution.machine import choose_device\n"
        "try:\n    print(choose_device('auto'))\n"
        "except ConfigError as error:\n    print(error)"
    )
    assert run(code, environment).startswith("there is a GPU, but CUDA cannot start: ")
    assert run(code, environment | {"LD_LIBRARY_PATH": ""}) == "cpu"
