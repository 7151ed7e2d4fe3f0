"""Other projects' Go modules, fetched and built once into the cache: tests read their definitions and run programs."""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

MODULES = CACHE / "go-modules"


@cache
def fetch(module: str) -> Path:
    """Fetch a module (`path@version`) and return its folder. Raises ProgramFailed."""
    environment = build_environment(MODULES)
    done = programs.run("go", "mod", "download", "-json", module, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise programs.ProgramFailed(done.stdout + done.stderr)
    return Path(json.loads(done.stdout)["Dir"])


def build(module: str, folder: Path, names: Sequence[str]) -> None:
    """Build `./cmd/NAME` of a module into `folder` for each name, unless all are there. Raises CalledProcessError.

    What Go caches for the build, gigabytes, is deleted afterwards.
    """
    if all((folder / name).exists() for name in names):
        return
    partial = folder / "partial"
    source = partial / "source"
    shutil.rmtree(source, ignore_errors=True)
    # Go applies the `replace` lines of a go.mod to a main module only, and nothing in the module cache is one.
    shutil.copytree(fetch(module), source)
    environment = build_environment(partial / "modules") | {"GOCACHE": str(partial / "build"), "CGO_ENABLED": "0"}
    options: dict[str, Any] = {"cwd": source, "env": environment, "check": True}
    packages = [f"./cmd/{name}" for name in names]
    with announced(f"{module}: building {', '.join(names)}"):
        programs.run("go", "build", "-trimpath", "-ldflags=-s -w", "-o", f"{partial}/bin/", *packages, **options)
    for name in names:
        (partial / "bin" / name).rename(folder / name)
    shutil.rmtree(partial)


def build_folder(source: Path) -> Path:
    """Build the program in a folder with `go.mod` and `go.sum`, and return its path. Raises CalledProcessError.

    It is built again if a file in the folder changes. What Go caches for the build is deleted afterwards.
    """
    files = sorted(file for file in source.iterdir() if file.suffix in (".go", ".mod", ".sum"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    program = CACHE / f"{source.name}-{digest}" / source.name
    program.parent.mkdir(parents=True, exist_ok=True)
    with (program.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # workers of pytest need it at the same time
        if not program.exists():
            partial = program.parent / "partial"
            environment = build_environment(partial / "modules")
            environment |= {"GOCACHE": str(partial / "build"), "CGO_ENABLED": "0"}
            built = partial / program.name
            command = ["go", "build", "-mod=readonly", "-trimpath", "-ldflags=-s -w", "-o", str(built), "."]
            with announced(f"{source.name}: building it"):
                programs.run(*command, cwd=source, env=environment, check=True)
            built.rename(program)
            shutil.rmtree(partial)
    return program


def build_environment(modules: Path) -> dict[str, str]:
    """Return the environment for Go. modules: the folder for modules that it fetches."""
    return os.environ | {"GOMODCACHE": str(modules), "GOFLAGS": "-modcacherw -buildvcs=false -mod=mod"}
