"""kstatus: the library with which Helm, Flux and Config Sync judge an object. Built once, by a slow test.

`compute` returns the library's status for each object: Current, InProgress, Failed or another of its words.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e import go_module
from e2e.cluster import programs


def compute(objects: Sequence[dict[str, Any]]) -> list[str]:
    """Return kstatus' word for each object. Raises ProgramFailed."""
    done = programs.run(build(), input=json.dumps(objects), capture_output=True, text=True)
    if done.returncode:
        raise programs.ProgramFailed(done.stderr)
    return [line.split("\t")[0] for line in done.stdout.splitlines()]


def build() -> Path:
    """Build the program in this folder and return its path."""
    return go_module.build_folder(Path(__file__).parent)
