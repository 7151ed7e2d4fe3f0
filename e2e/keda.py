"""KEDA itself, from its Go module: its operator, its metrics server and its admission webhook as programs.

Made once, by `make keda`; `tests/keda` runs them, and other tests take its definitions from the module.
"""

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "2.21.0"
FOLDER = CACHE / f"keda-{VERSION}"
PROGRAMS = ("operator", "adapter", "webhooks")
_MODULE = f"github.com/kedacore/keda/v2@v{VERSION}"
_PARTIAL = FOLDER / "partial"


@cache
def fetch() -> Path:
    """The folder of its module: 20 MB."""
    environment = _go(CACHE / "keda")
    done = programs.run("go", "mod", "download", "-json", _MODULE, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise programs.ProgramFailed(done.stdout + done.stderr)
    return Path(json.loads(done.stdout)["Dir"])


def build() -> None:
    """About 15 minutes of a core, and 6 GB that are gone afterwards."""
    if all((FOLDER / name).exists() for name in PROGRAMS):
        return
    source = _PARTIAL / "source"
    shutil.rmtree(source, ignore_errors=True)
    # What its go.mod replaces is replaced for a main module only, which none in the module cache is.
    shutil.copytree(fetch(), source)
    with announced(f"KEDA {VERSION}: building it, which takes a core 15 minutes"):
        environment = _go(_PARTIAL / "modules") | {"GOCACHE": str(_PARTIAL / "build"), "CGO_ENABLED": "0"}
        options: dict[str, Any] = {"cwd": source, "env": environment, "check": True}
        packages = [f"./cmd/{name}" for name in PROGRAMS]
        programs.run("go", "build", "-trimpath", "-ldflags=-s -w", "-o", f"{_PARTIAL}/bin/", *packages, **options)
    for name in PROGRAMS:
        (_PARTIAL / "bin" / name).rename(FOLDER / name)
    shutil.rmtree(_PARTIAL)


def _go(modules: Path) -> dict[str, str]:
    return os.environ | {"GOMODCACHE": str(modules), "GOFLAGS": "-modcacherw -buildvcs=false -mod=mod"}


if __name__ == "__main__":
    build()
