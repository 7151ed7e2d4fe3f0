"""Where everything made by this package lives: one cache folder, no file elsewhere.

Used by every module of the package. `CONVEYOR_CACHE` moves the folder (unix sockets live in it: keep it short).
"""

import os
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("CONVEYOR_CACHE") or Path.home() / ".cache" / "conveyor")
