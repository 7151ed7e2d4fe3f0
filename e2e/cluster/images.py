"""Builds the two container images, with Docker or with buildah, and knows what each of them has built.

Called by `python -m e2e.cluster images`, the loaders and the installation, which say which of the two it is.
Does not load them anywhere.
"""

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import buildah, debian
from e2e.cluster.paths import REPOSITORY


@dataclass(frozen=True, slots=True)
class Image:
    """A Dockerfile of the repository and the repository name of what it builds, as container runtimes spell it."""

    repository: str
    dockerfile: Path

    @property
    def name(self) -> str:
        return f"{self.repository}:dev"


IMAGES = {
    "control": Image("docker.io/conveyor/control", REPOSITORY / "operator" / "Dockerfile"),
    "engine": Image("docker.io/conveyor/engine", REPOSITORY / "engine" / "Dockerfile"),
}


class ImageMissing(RuntimeError):
    """An image is not built yet; the message names the command that builds it."""


def image_id(image: Image, docker: bool) -> str:
    """Identity of a built image, without the name of the digest; `ImageMissing` if there is none."""
    if docker:
        inspect = ["docker", "image", "inspect", "--format", "{{.Id}}", image.name]
        found = subprocess.run(inspect, capture_output=True, text=True).stdout.strip().removeprefix("sha256:")
    else:
        found = buildah.image_id(image.name)
    if not found:
        raise ImageMissing(f"{image.name} is not built: run `make images`")
    return found


def loaded_tag(name: str, docker: bool) -> str:
    """The tag that `load` gives to the built image `control` or `engine`.

    It changes with the content, so an upgrade of the chart replaces the pods exactly when their code changed.
    """
    return f"dev-{image_id(IMAGES[name], docker)[:12]}"


def build_all(docker: bool) -> None:
    if not docker:
        debian.require(debian.IMAGE_PACKAGES)
    for image in IMAGES.values():
        print(f"building {image.name} ...", flush=True)
        started = time.monotonic()
        if docker:
            build = ["docker", "build", "--tag", image.name, "--file", str(image.dockerfile), str(REPOSITORY)]
            subprocess.run(build, check=True)
        else:
            buildah.build(image.name, image.dockerfile)
        print(f"built {image.name} in {time.monotonic() - started:.0f} s", flush=True)
