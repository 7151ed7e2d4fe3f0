"""Tests that SIGTERM ends a program that still imports its libraries, also as the first process of a container."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_SLOW_IMPORT = """
import sys, time
from importlib.machinery import PathFinder


class Slow(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == {module!r}:
            print("importing", flush=True)
            time.sleep(60)


sys.meta_path.insert(0, Slow)
"""


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("conveyor_gateway", "uvloop"),
        ("conveyor_metrics", "conveyor_metrics.server"),
        ("conveyor_console", "conveyor_console.server"),
        ("conveyor_operator", "kopf"),
    ],
)
def test_sigterm_ends_a_program_that_still_imports(tmp_path: Path, program: str, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(_SLOW_IMPORT.format(module=module))
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    }
    with subprocess.Popen(
        [sys.executable, "-m", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 128 + signal.SIGTERM, "a handler ended it; without one it is -15"
