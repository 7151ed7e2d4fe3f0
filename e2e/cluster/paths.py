"""Paths of everything that this package makes. All of it is in one cache folder.

Used by every module of the package. `CONVEYOR_CACHE` sets another folder. Keep its path short, because it contains Unix
sockets.
"""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("CONVEYOR_CACHE") or Path.home() / ".cache" / "conveyor")
