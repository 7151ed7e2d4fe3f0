"""KEDA itself, from its Go module: its operator, its metrics server and its admission webhook as programs.

`make keda` builds the programs once, and `tests/keda` runs them. Other tests read KEDA's definitions from the module.
"""

from pathlib import Path

from e2e import go_module
from e2e.cluster.paths import CACHE

VERSION = "2.21.0"
FOLDER = CACHE / f"keda-{VERSION}"
PROGRAMS = ("operator", "adapter", "webhooks")
_MODULE = f"github.com/kedacore/keda/v2@v{VERSION}"


def fetch() -> Path:
    """Fetch KEDA's module (20 MB) and return its folder."""
    return go_module.fetch(_MODULE)


def build() -> None:
    """Build KEDA. Takes about 15 minutes of a core, and 6 GB that are deleted afterwards."""
    go_module.build(_MODULE, FOLDER, PROGRAMS)


if __name__ == "__main__":
    build()
