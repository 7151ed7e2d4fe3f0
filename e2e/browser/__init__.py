"""Chromium without a window, and its driver. Downloaded once, from npm.

Programs for it are files in JavaScript that import `visit.mjs`. They run in the folder that `provide` returns.
"""

from pathlib import Path
from typing import Final

from e2e.clients.matrix import BROWSER
from e2e.cluster import programs
from e2e.cluster.paths import CACHE, REPOSITORY

PICTURES: Final = REPOSITORY / "build" / "console"
_FOLDER: Final = CACHE / "browser"


def provide() -> Path:
    """Return the folder with the packages. Raises ProgramFailed, or ProgramMissing without Node.js."""
    if not (_FOLDER / "node_modules").exists():
        names = [package.removeprefix("npm:") for package in BROWSER]
        programs.run_quietly("npm", "install", "--no-audit", "--no-fund", "--prefix", _FOLDER, *names)
    PICTURES.mkdir(parents=True, exist_ok=True)
    return _FOLDER
