"""A pytest plugin that executes the AMX instructions of the compiled kernels in `amx_emulator.c`, on CPUs with only
AVX512.

The machine code of the shipped library runs. Only its check for AMX is overwritten, in the memory of this process.
`test_emulated_tiles.py` runs tests with it in a separate process, because nothing else may handle SIGILL: `pytest -p
tests.engine.execution.native.amx_emulator -p no:faulthandler ...`.
"""

import ctypes
import mmap
import os
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from conveyor_engine.execution import native
from conveyor_engine.execution.native import library

_SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-std=gnu11", "-O2", "-fPIC", "-shared", "-mavx512f", "-mfma")
_RETURN_1 = b"\xb8\x01\x00\x00\x00\xc3"
_READ_WRITE_EXECUTE = 7


def pytest_configure() -> None:
    assert _emulator().emulate_amx() == 0
    _answer_yes(library.load(), Path(library.load()._name), "has_amx")
    assert native.use_isa("amx")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print whether anything was emulated, and whether all tiles were released."""
    counts = (_emulator().emulated_products(), _emulator().threads_with_tiles())
    terminalreporter.write_line("emulated products of tiles: {}, threads that kept tiles: {}".format(*counts))


@cache
def _emulator() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        compiled = Path(folder) / "emulator.so"
        subprocess.run([os.environ.get("CC", "cc"), *_FLAGS, str(_SOURCE), "-o", str(compiled)], check=True)
        emulator = ctypes.CDLL(str(compiled))
    emulator.emulated_products.restype = emulator.threads_with_tiles.restype = ctypes.c_int64
    return emulator


def _answer_yes(loaded: ctypes.CDLL, path: Path, function: str) -> None:
    """Overwrite a private function of the library so that it returns true."""
    listed = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True).stdout.splitlines()
    offsets = {words[2]: int(words[0], 16) for words in map(str.split, listed) if len(words) == 3}
    exported = ctypes.cast(loaded.cv_isa, ctypes.c_void_p).value
    assert exported is not None
    address = exported - offsets["cv_isa"] + offsets[function]
    page = address // mmap.PAGESIZE * mmap.PAGESIZE
    mprotect = ctypes.CDLL(None, use_errno=True).mprotect
    mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    assert mprotect(page, 2 * mmap.PAGESIZE, _READ_WRITE_EXECUTE) == 0, os.strerror(ctypes.get_errno())
    ctypes.memmove(address, _RETURN_1, len(_RETURN_1))
