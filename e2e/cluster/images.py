"""Builds the two container images, with Docker or with buildah, and knows what each of them has built.

Called by `python -m e2e.cluster images`, the loaders and the installation, which say which of the two it is.
Does not load them anywhere.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import buildah, programs
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.progress import announced


@dataclass(frozen=True, slots=True)
class Image:
    """A Dockerfile of the repository and the repository name of what it builds, as container runtimes spell it."""

    repository: str
    dockerfile: Path

    @property
    def name(self) -> str:
        return f"{self.repository}:dev"

    @property
    def loaded_last(self) -> str:
        """The newest one's name on the nodes: the chart's default, so that a plain `helm install` finds it there."""
        return f"{self.repository}:{_VERSION}"


_VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
IMAGES = {
    "control": Image("docker.io/conveyor/control", REPOSITORY / "operator" / "Dockerfile"),
    "engine": Image("docker.io/conveyor/engine", REPOSITORY / "engine" / "Dockerfile"),
}


class ImageMissing(RuntimeError):
    """An image is not built yet; the message names the command that builds it."""


def image_id(image: Image, docker: bool) -> str:
    """Identity of a built image, without the name of the digest; `ImageMissing` if there is none."""
    if docker:
        inspect = ("image", "inspect", "--format", "{{.Id}}", image.name)
        found = programs.run("docker", *inspect, capture_output=True, text=True).stdout.strip().removeprefix("sha256:")
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
    programs.require(*(("docker",) if docker else programs.IMAGES))
    for image in IMAGES.values():
        if docker:
            with announced(f"images: building {image.name}"):
                build = ("build", "--tag", image.name, "--file", image.dockerfile, REPOSITORY)
                programs.run("docker", *build, check=True)
        else:
            buildah.build(image.name, image.dockerfile)
