"""Other projects' Go modules, of which tests read definitions: fetched once into the cache."""

import json
import os
from functools import cache
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import CACHE

MODULES = CACHE / "go-modules"


@cache
def fetch(module: str) -> Path:
    """The folder of a module, which is `path@version`. Raises ProgramFailed."""
    environment = build_environment(MODULES)
    done = programs.run("go", "mod", "download", "-json", module, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise programs.ProgramFailed(done.stdout + done.stderr)
    return Path(json.loads(done.stdout)["Dir"])


def build_environment(modules: Path) -> dict[str, str]:
    """For Go: `modules` is where it keeps what it fetches."""
    return os.environ | {"GOMODCACHE": str(modules), "GOFLAGS": "-modcacherw -buildvcs=false -mod=mod"}
