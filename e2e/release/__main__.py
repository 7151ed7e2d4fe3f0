"""`make release-check`: publish the built images and the chart to a registry on this machine, and verify them.

Writes the images as OCI archives into `dist/release`, beside the wheel, the chart and the bills of materials.
"""

import tempfile
from pathlib import Path

from e2e.cluster import buildah
from e2e.cluster.images import IMAGES
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.progress import announced
from e2e.release import tools
from e2e.release.publishing import Key, publish, verify
from e2e.release.registry import running_registry

OUT = REPOSITORY / "dist" / "release"


def main() -> None:
    tools.build()
    archives = {}
    for name, image in IMAGES.items():
        with announced(f"release: writing the OCI archive of {image.name}"):
            archives[name] = f"oci-archive:{buildah.archive(image.name, OUT / f'{name}.oci.tar')}"
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="release-") as name:
        folder = Path(name)
        key = Key.generate(folder)
        with running_registry(folder) as registry, announced("release: publishing, signing and verifying"):
            release = publish(registry, archives, OUT, key, folder)
            verify(release, key)
    print(f"signed and verified:\n{release.control}\n{release.engine}\n{release.chart}", flush=True)


if __name__ == "__main__":
    main()
