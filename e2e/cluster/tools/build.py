"""`python3 -m e2e.cluster.tools.build all|cluster`: build the programs of Kubernetes that are not in the cache yet.

They are built from the Go module in this folder. `cluster` means the programs that `make cluster` and its users need.
Standard library only, so that it can run while the virtual environment is made. An interrupted build continues with the
packages that it has compiled.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from e2e.cluster import kind, programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced
from e2e.cluster.tools import ALL, CLIENTS, CLUSTER, MODULE, ProgramMissing, Tool, binary, folder, tool_named

KUBERNETES_VERSION = "1.37.1"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_PROGRESS_SECONDS = 15.0
# With less frequent garbage collection the compiler takes a tenth less time, and at most half a gigabyte of memory.
_COMPILER_GOGC = "300"


def missing(names: Iterable[str]) -> list[Tool]:
    return [tool for name in names if not (tool := tool_named(name)).path.exists()]


def build_missing(names: Iterable[str]) -> None:
    """Build the programs that are missing. Raises `ProgramMissing` without Go."""
    if tools := missing(names):
        programs.require("go")
        _build(tools)


def provide_clients() -> None:
    """Build `CLIENTS` if Go is installed, otherwise find them on the PATH. Raises `ProgramMissing` if neither works."""
    if programs.found("go"):
        build_missing(CLIENTS)
        return
    try:
        for name in CLIENTS:
            binary(name)
    except ProgramMissing:
        raise ProgramMissing(f"{' and '.join(CLIENTS)} are needed: install them, or Go >= 1.26") from None


def _build(tools: Sequence[Tool]) -> None:
    """Build all programs in one command, so that one is linked while another is compiled. Then delete the compiler's
    caches."""
    packages = [tool.package for tool in tools]
    with announced(f"programs: fetching the modules of {', '.join(tool.name for tool in tools)}"):
        listed = programs.run("go", "list", "-deps", *packages, capture_output=True, **_in_module())
    if listed.returncode:
        raise ProgramMissing(f"the modules of Kubernetes could not be fetched:\n{listed.stderr[-2000:]}")
    started = time.monotonic()
    partial = folder() / "partial"
    # Without debug information, compiling takes an eighth less time.
    flags = ["-v", "-trimpath", "-gcflags=all=-dwarf=false", f"-ldflags={_linker_flags()}", "-o", f"{partial}/"]
    with programs.start("go", "build", *flags, *packages, stderr=subprocess.PIPE, **_in_module()) as compiler:
        assert compiler.stderr is not None
        _show_progress(compiler.stderr, len(listed.stdout.split()), started)
    if compiler.returncode:
        raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
    for tool in tools:
        (partial / tool.built_as).rename(tool.path)
    shutil.rmtree(partial)
    print(f"programs: built in {time.monotonic() - started:.0f} s", flush=True)
    # The caches take 9 GB and are useless once the programs are built.
    shutil.rmtree(CACHE / "go", ignore_errors=True)


def _show_progress(lines: Iterable[str], total: int, started: float) -> None:
    """Count the packages that `go build -v` names, and print its other output."""
    num_compiled, shown = 0, time.monotonic()
    for line in lines:
        if re.fullmatch(r"[^\s:]+\n", line) is None:
            sys.stderr.write(line)
            continue
        num_compiled += 1
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            shown = time.monotonic()
            print(f"programs: compiled {num_compiled} of {total} packages, {shown - started:.0f} s", flush=True)


def _in_module() -> dict[str, Any]:
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-modcacherw -buildvcs=false -mod=readonly",
        "GOGC": _COMPILER_GOGC,
        "GOCACHE": str(CACHE / "go" / "build"),
        "GOMODCACHE": str(CACHE / "go" / "modules"),
    }
    return {"cwd": MODULE, "env": environment, "text": True}


def _linker_flags() -> str:
    # Without these, clients see version v0.0.0-master and refuse some features.
    major, minor, _ = KUBERNETES_VERSION.split(".")
    values = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{key}={value}" for key, value in values.items())])


def main(which: str) -> None:
    if which == "cluster" and kind.is_requested():
        provide_clients()
    else:
        build_missing({"all": ALL, "cluster": CLUSTER}[which])


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except ProgramMissing as error:
        sys.exit(str(error))
