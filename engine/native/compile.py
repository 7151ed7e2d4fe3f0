"""Compiles the CPU kernels into one shared library: `python engine/native/compile.py [OUTPUT]`.

Called by the wheel's build hook (`hatch_build.py`) and by hand while working on the kernels. Standard library only.

Every kernel file is compiled once for each instruction set, with the flags for this set only. So the library runs on
any CPU of the architecture, and chooses the kernels at run time (src/dispatch.c). `-march=native` would tie it to this
machine. OpenMP's runtime is not linked in. Its symbols resolve to the runtime that torch has loaded, so that both share
one pool of threads.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "src"
LIBRARY = HERE.parent / "conveyor_engine" / "execution" / "native" / "libconveyor.so"

COMMON_FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-Wall", "-Wextra"),
    # Multiply-adds may be fused. Nothing reads errno or traps. -ffast-math is left out, because NaN and infinity occur.
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
)
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mprefer-vector-width=512")
_AVX512VNNI = (*_AVX512, "-mavx512vnni")
_AVX512BF16 = (*_AVX512VNNI, "-mavx512bf16")
_AMX = (*_AVX512BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8")
_X86_FLAGS = {
    "avx2": _AVX2,
    "avxvnni": (*_AVX2, "-mavxvnni"),
    "avx512": _AVX512,
    "avx512vnni": _AVX512VNNI,
    "avx512bf16": _AVX512BF16,
    "amx": _AMX,
}
# Sets that old compilers (GCC before 10 and 11) or assemblers lack, each with an instruction to test for the set.
_OPTIONAL = {
    "avxvnni": "{vex} vpdpbusd %ymm0, %ymm1, %ymm2",
    "avx512vnni": "vpdpbusd %zmm0, %zmm1, %zmm2",
    "avx512bf16": "vdpbf16ps %zmm0, %zmm1, %zmm2",
    "amx": "tilerelease",
}
_KERNELS = ("attention", "elementwise", "linear", "sample", "states")
# For its other kernels, each of these sets uses those of another: amx of avx512bf16, and vnni of the set in its name.
_OWN_KERNELS = {"amx": ("linear",), "avx512vnni": ("linear",), "avxvnni": ("linear",)}
_ONCE = ("dispatch", "experts", "layer")  # compiled once, for all instruction sets


class CompileError(Exception):
    """The compiler is missing or failed. The message has the compiler's output."""


def compile_library(output: Path = LIBRARY) -> Path:
    """Compile and link the library, and replace `output` by it in one step. Raises CompileError."""
    compiler = os.environ.get("CC", "cc")
    output.parent.mkdir(parents=True, exist_ok=True)
    sets = {"generic": ()} | (_X86_FLAGS if _run([compiler, "-dumpmachine"]).startswith("x86_64") else {})
    with tempfile.TemporaryDirectory(prefix=".native-", dir=output.parent) as folder:
        for isa in sets.keys() & _OPTIONAL:
            if not _knows([compiler, *sets[isa]], _OPTIONAL[isa], Path(folder)):
                del sets[isa]
        objects = [
            (Path(folder) / f"{name}.{isa}.o", name, isa) for isa in sets for name in _OWN_KERNELS.get(isa, _KERNELS)
        ]
        commands = [
            [compiler, *COMMON_FLAGS, *sets[isa], f"-DCV_ISA={isa}", "-c", str(SOURCES / f"{name}.c"), "-o", str(path)]
            for path, name, isa in objects
        ]
        have = [f"-DCV_HAVE_{isa.upper()}" for isa in _OPTIONAL if isa in sets]
        once = [(Path(folder) / f"{name}.o", name) for name in _ONCE]
        commands += [
            [compiler, *COMMON_FLAGS, *have, "-c", str(SOURCES / f"{name}.c"), "-o", str(path)] for path, name in once
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(_run, commands))
        linked = Path(folder) / output.name
        _run([compiler, "-shared", "-o", str(linked), *(str(path) for path, *_ in (*once, *objects))])
        linked.replace(output)
    return output


def _knows(compiler: Sequence[str], instruction: str, folder: Path) -> bool:
    program = folder / "known.c"
    program.write_text(f'void known(void) {{ __asm__("{instruction}"); }}\n')
    try:
        _run([*compiler, "-c", str(program), "-o", str(folder / "known.o")])
    except CompileError:
        return False
    return True


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise CompileError(f"cannot run the C compiler {command[0]!r}: {error}; install one or set CC") from error
    if done.returncode:
        raise CompileError(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(compile_library(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else LIBRARY))
    except CompileError as error:
        sys.exit(f"compiling the CPU kernels failed: {error}")
