"""Builds images without a daemon: with buildah, a store below the cache folder, and a Debian base built here.

Called by `images` and `load` if Docker does not build. The base replaces `python:3.x-slim`, so no image registry is
needed.
"""

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.progress import announced

_RELEASE = "bookworm"
# python3-dev: like python:3.x-slim, the base has Python's headers, because Triton compiles against them.
_PACKAGES = ("python3", "python3-venv", "python3-dev", "ca-certificates")
_AUTHORITIES = "/etc/ssl/certs"


_STORE = ("--storage-driver", "overlay", "--root", CACHE / "images", "--runroot", CACHE / "images-run")


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of an image: the digest of its uncompressed archive, and the folder with its files as overlayfs mounts
    them."""

    digest: str
    folder: Path


@dataclass(frozen=True, slots=True)
class Stored:
    """An image in the store: its manifest and configuration, as JSON, and its layers, the lowest first."""

    manifest: str
    configuration: str
    layers: list[Layer]


def build(name: str, dockerfile: Path, arguments: Iterable[str] = ()) -> set[str]:
    """Build one of the repository's Dockerfiles with these build arguments. Layers are cached in the store.

    Returns the ids of all images that the build made or found in the cache, shortened as buildah prints them. `prune`
    keeps these. Nothing else distinguishes an unnamed image that is still used, such as a stage that files are copied
    from, from waste.
    """
    base = _base()
    options = [f"--build-arg={argument}" for argument in (f"BASE={base}", *arguments)]
    with announced(f"images: building {name}"):
        printed = programs.run_quietly(
            "buildah", *_STORE, "build", "--layers", "--isolation", "chroot", "--network", "host",
            "--volume", f"{_AUTHORITIES}:{_AUTHORITIES}:ro", *options,
            "--tag", name, "--file", dockerfile, REPOSITORY,
        )  # fmt: skip
    return set(re.findall(r"^--> ([0-9a-f]{11})$", printed, re.MULTILINE))


def prune(used: set[str]) -> None:
    """Remove the layers of earlier builds: those without a name that the latest builds (`used`) did not use."""
    listed = _buildah("images", "--all", "--no-trunc", "--format", "{{.ID}} {{.Name}}").stdout.splitlines()
    images = [line.removeprefix("sha256:").split() for line in listed]
    unused = [identity for identity, name in images if name == "<none>" and identity[:11] not in used]
    if unused:
        _buildah("rmi", *unused)  # listed newest first, so none depends on an earlier one in the list


def remove(name: str) -> None:
    """Remove an image, and the layers that no other image has."""
    programs.run_quietly("buildah", *_STORE, "rmi", name)


def read_image(name: str) -> Stored:
    """Return an image's documents and layers. Reads the files of the store: no command names a layer's folder."""
    described = json.loads(programs.run_quietly("buildah", *_STORE, "inspect", "--type", "image", name))
    images = json.loads((CACHE / "images" / "overlay-images" / "images.json").read_text())
    known = {one["id"]: one for one in json.loads((CACHE / "images" / "overlay-layers" / "layers.json").read_text())}
    layer = next(image["layer"] for image in images if image["id"] == described["FromImageID"])
    layers: list[Layer] = []
    while layer:
        layers.insert(0, Layer(known[layer]["diff-digest"], CACHE / "images" / "overlay" / layer / "diff"))
        layer = known[layer].get("parent")
    return Stored(described["Manifest"], described["Config"], layers)


def source(name: str) -> str:
    """Return the name by which skopeo reads an image from the store."""
    return f"containers-storage:[overlay@{CACHE / 'images'}+{CACHE / 'images-run'}]{name}"


def archive(name: str, file: Path) -> Path:
    """Write an image into an OCI archive and return its path."""
    file.unlink(missing_ok=True)  # skopeo adds to no archive
    programs.run_quietly("skopeo", "copy", "--quiet", "--insecure-policy", source(name), f"oci-archive:{file}:{name}")
    return file


def image_id(name: str) -> str:
    """Return the identity of an image in the store (the digest of its configuration); empty if it does not exist."""
    return _buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", name).stdout.strip()


def _base() -> str:
    recipe = json.dumps([_RELEASE, _PACKAGES])
    name = f"localhost/conveyor-base:{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if not image_id(name):
        with announced("images: making their base from Debian packages"):
            _make_base(name)
    return name


def _make_base(name: str) -> None:
    root = CACHE / "base"
    shutil.rmtree(root, ignore_errors=True)
    try:
        include = f"--include={','.join(_PACKAGES)}"
        programs.run_quietly("debootstrap", "--variant=minbase", include, _RELEASE, root)
        for waste in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / waste)
            (root / waste / "partial").mkdir(parents=True)
        container = programs.run_quietly("buildah", *_STORE, "from", "scratch").strip()
        programs.run_quietly("buildah", *_STORE, "add", container, root, "/")
        programs.run_quietly("buildah", *_STORE, "config", "--env", "LANG=C.UTF-8", "--cmd", "python3", container)
        programs.run_quietly("buildah", *_STORE, "commit", "--rm", container, name)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _buildah(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return programs.run("buildah", *_STORE, *arguments, capture_output=True, text=True)
