"""The rooms without torch pull none in when they run: what a library imports is not seen by import-linter."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["serving.server", "serving.preparing.process", "scheduling.scheduler", "fetching.fetch", "__main__"]
)
def test_the_module_does_not_pull_in_torch(module: str) -> None:
    code = f"import sys, conveyor_engine.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
