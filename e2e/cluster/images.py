"""Builds the two container images with Docker or with buildah, and finds the ids of built images.

Called by `python -m e2e.cluster images`, the loaders and the installation; the caller chooses between Docker and
buildah. Does not load images anywhere.
"""

import shutil
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import buildah, programs
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.progress import announced


@dataclass(frozen=True, slots=True)
class Image:
    """A Dockerfile of the repository, and the repository name of its image as container runtimes spell it."""

    repository: str
    dockerfile: Path
    arguments: tuple[str, ...] = ()  # of the build, as NAME=VALUE

    @property
    def name(self) -> str:
        return f"{self.repository}:dev"

    @property
    def loaded_last(self) -> str:
        """Return the newest image's name on the nodes.

        It is the chart's default, so a plain `helm install` finds it.
        """
        return f"{self.repository}:{_VERSION}"


_VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
IMAGES = {
    "control": Image("docker.io/conveyor/control", REPOSITORY / "operator" / "Dockerfile"),
    # The GPUs of these clusters are fake, so the image has no CUDA.
    "engine": Image("docker.io/conveyor/engine", REPOSITORY / "engine" / "Dockerfile", ("CUDA=no",)),
}
# A copy of the uv.lock of the latest build. If uv.lock has changed since, nearly all of the engine image must be built
# again.
BUILT_FROM = CACHE / "images" / "built-from-uv.lock"


class ImageMissing(RuntimeError):
    """An image has not been built. The message names the command that builds it."""


def image_id(image: Image, docker: bool) -> str:
    """Return the identity of a built image, without the digest's algorithm. Raises `ImageMissing`."""
    if docker:
        inspect = ("image", "inspect", "--format", "{{.Id}}", image.name)
        found = programs.run("docker", *inspect, capture_output=True, text=True).stdout.strip().removeprefix("sha256:")
    else:
        found = buildah.image_id(image.name)
    if not found:
        raise ImageMissing(f"{image.name} is not built: run `make images`")
    return found


def loaded_tag(name: str, docker: bool) -> str:
    """Return the tag that `load` gives to the built image `control` or `engine`.

    The tag changes with the content. So an upgrade of the chart replaces the pods exactly if their code has changed.
    """
    return f"dev-{image_id(IMAGES[name], docker)[:12]}"


def build_all(docker: bool) -> None:
    """Build both images. With buildah, also remove the images that they replace."""
    programs.require(*(("docker",) if docker else programs.IMAGES))
    if docker:
        for image in IMAGES.values():
            build_with_docker(image.name, image.dockerfile, image.arguments)
    else:
        built = (buildah.build(image.name, image.dockerfile, image.arguments) for image in IMAGES.values())
        buildah.prune(set().union(*built))
    BUILT_FROM.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(REPOSITORY / "uv.lock", BUILT_FROM)


def build_with_docker(name: str, dockerfile: Path, arguments: Iterable[str] = ()) -> None:
    with announced(f"images: building {name}"):
        options = [f"--build-arg={argument}" for argument in arguments]
        programs.run("docker", "build", *options, "--tag", name, "--file", dockerfile, REPOSITORY, check=True)
