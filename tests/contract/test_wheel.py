"""Tests that the wheel contains each package of the product, and that its programs start from it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from e2e.cluster.paths import CACHE, REPOSITORY

PROGRAMS = (
    "conveyor_operator", "conveyor_gateway", "conveyor_metrics", "conveyor_console", "conveyor_jobs",
    "conveyor_kubectl", "conveyor_local",
)  # fmt: skip
NOT_SHIPPED = {"conveyor_bench"}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the content of the wheel that uv builds."""
    folder = tmp_path_factory.mktemp("wheel")
    (uv,) = CACHE.glob("uv-*/bin/uv")
    subprocess.run([uv, "build", "--wheel", "--quiet", "--out-dir", folder, REPOSITORY], check=True, timeout=240)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.slow
def test_the_wheel_has_every_package_but_the_measurements(installed: Path) -> None:
    packages = {file.parent.name for file in REPOSITORY.glob("*/conveyor_*/__init__.py")}
    assert {file.parent.name for file in installed.glob("*/__init__.py")} == packages - NOT_SHIPPED


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_starts_from_the_wheel(program: str, installed: Path) -> None:
    command = [sys.executable, "-m", program, "--help"]
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run(command, cwd=installed, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "usage: " in done.stdout
