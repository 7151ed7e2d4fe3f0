"""The programs that publish a release, from their Go modules: CNCF's registry, and cosign, which signs.

Built once, by `make release-check`.
"""

from typing import Final

from e2e import go_module
from e2e.cluster.paths import CACHE

_REGISTRY_VERSION: Final = "3.1.2"
_COSIGN_VERSION: Final = "3.1.3"
REGISTRY: Final = CACHE / f"registry-{_REGISTRY_VERSION}" / "registry"
COSIGN: Final = CACHE / f"cosign-{_COSIGN_VERSION}" / "cosign"


def build() -> None:
    for module, program in (
        (f"github.com/distribution/distribution/v3@v{_REGISTRY_VERSION}", REGISTRY),
        (f"github.com/sigstore/cosign/v3@v{_COSIGN_VERSION}", COSIGN),
    ):
        go_module.build(module, program.parent, (program.name,))
