"""Leaves CUDA's libraries out of an installation for a machine without a GPU: 4 of its 5.7 GB (docs/adr/0143).

`python3 engine/no_cuda.py options FLAG [PACKAGE...]` prints the options that keep uv from installing the packages of
uv.lock that have these libraries, and PACKAGE. `python3 engine/no_cuda.py fill FOLDER` then writes the files that torch
needs in their place, in an environment below FOLDER. Called by the Makefile and engine/Dockerfile. Standard library
only; `fill` needs a C compiler and binutils.

The torch of PyPI for Linux is linked against these libraries, so it does not load without them. Without a GPU it calls
none of their functions. So `fill` compiles libraries of the same names, whose functions end the process with a message.
torch looks for the real libraries first, so packages that are installed later take effect.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

# torch calls these two on any machine: it counts GPUs, and its profiler registers itself.
KEPT = ("nvidia-cuda-runtime", "nvidia-cuda-cupti")
_LEFT_OUT = re.compile(r"nvidia-|cuda-")
_LIBRARY = re.compile(r"lib(cu|nccl|nv)\w*\.so\.")
_DRIVER = "libcuda.so.1"  # comes with a GPU's driver. torch loads it only if it exists
_NOTE = "stand-ins.txt"  # names the libraries that are written here
_FUNCTION = re.compile(r"(cu|nccl|nv)\w*")
_HEAD = """\
#include <stdio.h>
#include <stdlib.h>
#define STAND_IN(name) void name(void) { \\
    fputs("CUDA is left out of this installation (docs/adr/0143), and " #name " was called\\n", stderr); abort(); }
"""


def find_packages(lock: Path) -> list[str]:
    """Return the names of the packages with CUDA's libraries, except `KEPT`."""
    names = [package["name"] for package in tomllib.loads(lock.read_text())["package"]]
    return sorted({name for name in names if _LEFT_OUT.match(name) and name not in KEPT})


def fill(site_packages: Path) -> list[str]:
    """Write a library for each one that torch is linked against and that is missing. Return their names.

    The libraries of an earlier call are removed first, as they may be for another version of torch.
    """
    folder = site_packages / "torch" / "lib"
    note = folder / _NOTE
    for name in note.read_text().split() if note.exists() else ():
        (folder / name).unlink(missing_ok=True)
    ours = sorted(folder.glob("*.so*"))
    if not ours:
        return []  # no torch, or one of another system
    present = {path.name for path in (*ours, *site_packages.glob("nvidia/*/lib/*.so*"))}
    needed = {name for name in _read(("readelf", "-d"), ours, r"\(NEEDED\).*\[(.+)\]") if _LIBRARY.match(name)}
    missing = sorted(needed - present - {_DRIVER})
    if missing:
        others = [path for path in site_packages.glob("nvidia/*/lib/*.so*") if path.is_file()]
        wanted = set(_read(("nm", "-D", "--undefined-only"), ours, r" U (\w+)"))
        defined = set(_read(("nm", "-D", "--defined-only"), [*ours, *others], r" \w (\w+)"))
        functions = sorted(name for name in wanted - defined if _FUNCTION.fullmatch(name))
        note.write_text("\n".join(missing))
        _compile(folder, missing, functions)
    return missing


def _compile(folder: Path, names: Iterable[str], functions: Iterable[str]) -> None:
    """Write the libraries. The first has all functions: the loader looks for a function in all of them."""
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "stand_ins.c"
        source.write_text(_HEAD + "".join(f"STAND_IN({name})\n" for name in functions))
        for name in names:
            command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name]
            subprocess.run([*command, source], check=True)
            source.write_text("")


def _read(command: Iterable[str], files: Iterable[Path], pattern: str) -> Iterator[str]:
    done = subprocess.run([*command, *files], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    return (match[1] for match in re.finditer(pattern, done.stdout))


def main(command: str, first: str, *more: str) -> None:
    if command == "options":
        packages = [*find_packages(Path(__file__).parent.parent / "uv.lock"), *more]
        print(" ".join(f"{first} {name}" for name in packages))
    elif command == "fill":
        for folder in Path(first).glob("lib*/python3*/site-packages"):
            fill(folder)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FileNotFoundError as error:
        sys.exit(f"{error.filename} is needed to leave out CUDA's libraries: install it, or set CUDA=yes")
