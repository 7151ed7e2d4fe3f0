"""Tests loading the compiled kernels together with the OpenMP runtime that torch has loaded."""

import subprocess
import sys

import pytest

from conveyor_engine.execution import native

# Like torch's builds for arm64: other libraries see nothing that torch loads.
_KEPT_TO_ITSELF = """
import ctypes

class Local(ctypes.CDLL):
    def __init__(self, name, mode=ctypes.RTLD_LOCAL, **others):
        super().__init__(name, ctypes.RTLD_LOCAL, **others)

everyone, ctypes.CDLL = ctypes.CDLL, Local
import torch
ctypes.CDLL = everyone

from conveyor_engine.execution import native
native.linear(torch.ones(64, 64), native.pack_linear(torch.ones(64, 64)))
"""


@pytest.mark.slow
@pytest.mark.skipif(native.why_missing() is not None, reason=f"needs the compiled kernels: {native.why_missing()}")
def test_openmp_is_found_where_torch_keeps_it_to_itself() -> None:
    ran = subprocess.run([sys.executable, "-c", _KEPT_TO_ITSELF], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
