"""Prometheus and its promtool, from their Go module. Built once, by `make alerts`.

`tests/alerts` runs promtool on the rules and the dashboard, and reads the console's time lines from Prometheus.
"""

import shutil
from pathlib import Path
from typing import Any

from e2e import go_module
from e2e.cluster import programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "0.316.0"
FOLDER = CACHE / f"promtool-{VERSION}"
PROGRAM = FOLDER / "promtool"
SERVER = FOLDER / "prometheus"


def build() -> Path:
    """Build both and return promtool's path. All else that the build needs is deleted afterwards."""
    if not (PROGRAM.exists() and SERVER.exists()):
        partial = FOLDER / "partial"
        environment = go_module.build_environment(partial / "modules")
        environment |= {"GOCACHE": str(partial / "build"), "GOBIN": str(partial / "bin"), "CGO_ENABLED": "0"}
        options: dict[str, Any] = {"env": environment, "check": True}
        with announced(f"Prometheus {VERSION}: building it, which takes a core some minutes and 2 GB meanwhile"):
            # Without service discovery: the cloud SDKs that it needs would be most of the build.
            packages = [f"github.com/prometheus/prometheus/cmd/{each.name}@v{VERSION}" for each in (PROGRAM, SERVER)]
            programs.run("go", "install", "-tags=remove_all_sd", "-trimpath", "-ldflags=-s -w", *packages, **options)
        for each in (PROGRAM, SERVER):
            (partial / "bin" / each.name).rename(each)
        shutil.rmtree(partial)
    return PROGRAM


if __name__ == "__main__":
    build()
