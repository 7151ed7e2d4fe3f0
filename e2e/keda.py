"""KEDA itself, from its Go module: its operator, its metrics server and its admission webhook as programs.

Made once, by `make keda`; `tests/keda` runs them, and other tests take its definitions from the module.
"""

import shutil
from pathlib import Path
from typing import Any

from e2e import go_module
from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "2.21.0"
FOLDER = CACHE / f"keda-{VERSION}"
PROGRAMS = ("operator", "adapter", "webhooks")
_MODULE = f"github.com/kedacore/keda/v2@v{VERSION}"
_PARTIAL = FOLDER / "partial"


def fetch() -> Path:
    """The folder of its module: 20 MB."""
    return go_module.fetch(_MODULE)


def build() -> None:
    """About 15 minutes of a core, and 6 GB that are gone afterwards."""
    if all((FOLDER / name).exists() for name in PROGRAMS):
        return
    source = _PARTIAL / "source"
    shutil.rmtree(source, ignore_errors=True)
    # What its go.mod replaces is replaced for a main module only, which none in the module cache is.
    shutil.copytree(fetch(), source)
    with announced(f"KEDA {VERSION}: building it, which takes a core 15 minutes"):
        environment = go_module.build_environment(_PARTIAL / "modules")
        environment |= {"GOCACHE": str(_PARTIAL / "build"), "CGO_ENABLED": "0"}
        options: dict[str, Any] = {"cwd": source, "env": environment, "check": True}
        packages = [f"./cmd/{name}" for name in PROGRAMS]
        programs.run("go", "build", "-trimpath", "-ldflags=-s -w", "-o", f"{_PARTIAL}/bin/", *packages, **options)
    for name in PROGRAMS:
        (_PARTIAL / "bin" / name).rename(FOLDER / name)
    shutil.rmtree(_PARTIAL)


if __name__ == "__main__":
    build()
