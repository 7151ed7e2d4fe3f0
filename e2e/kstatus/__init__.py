"""kstatus: the library with which Helm, Flux and Config Sync judge an object. Built once, by a slow test.

`compute` returns the library's status for each object: Current, InProgress, Failed or another of its words.
"""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e import go_module
from e2e.cluster import programs
from e2e.cluster.paths import CACHE

_SOURCE = Path(__file__).parent


def compute(objects: Sequence[dict[str, Any]]) -> list[str]:
    """Return kstatus' word for each object. Raises ProgramFailed."""
    done = programs.run(build(), input=json.dumps(objects), capture_output=True, text=True)
    if done.returncode:
        raise programs.ProgramFailed(done.stderr)
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


def build() -> Path:
    """Build the program in this folder and return its path. All else that the build needs is deleted afterwards."""
    files = sorted(file for file in _SOURCE.iterdir() if file.suffix in (".go", ".mod", ".sum"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    program = CACHE / f"kstatus-{digest}" / "kstatus"
    if not program.exists():
        partial = program.parent / "partial"
        environment = go_module.build_environment(partial / "modules")
        environment |= {"GOCACHE": str(partial / "build"), "CGO_ENABLED": "0"}
        command = ["go", "build", "-trimpath", "-ldflags=-s -w", "-o", str(partial / "kstatus"), "."]
        programs.run(*command, cwd=_SOURCE, env=environment, check=True)
        (partial / "kstatus").rename(program)
        shutil.rmtree(partial)
    return program
