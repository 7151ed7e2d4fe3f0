"""The torch-free half of the engine stays torch-free: it is imported where torch must not be."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["request", "config", "errors", "block_manager", "policy", "request_state", "scheduler", "kv_budget"]
)
def test_the_module_does_not_pull_in_torch(module: str) -> None:
    code = f"import sys, conveyor_engine.{module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
