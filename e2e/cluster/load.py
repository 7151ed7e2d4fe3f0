"""Loads the built images into the nodes of the running cluster, and copies only what is missing.

Called by `python -m e2e.cluster load`. The digest of an image determines its tag on the nodes. kind's nodes do not get
an image again if they have one with that tag. The local provider copies no file: its node's layers are hard links. An
image that only one story runs is loaded under its own name, which changes with its sources. It is not kept elsewhere.
"""

import subprocess
from pathlib import Path

from e2e.cluster import buildah, kind, local, programs
from e2e.cluster.containerd import Containerd
from e2e.cluster.images import IMAGES, build_with_docker, image_id, loaded_tag
from e2e.cluster.progress import announced


def load_into_kind() -> None:
    for key, image in IMAGES.items():
        node = kind.NODES[key]
        runtime = Containerd("docker", "exec", node, "ctr")
        target = f"{image.repository}:{loaded_tag(key, docker=True)}"
        if runtime.has_image(target):
            print(f"{target} is loaded already", flush=True)
        else:
            with announced(f"images: bringing {target} to the node"):
                _stream(image.name, target, node)
        runtime.tag_image(target, image.loaded_last)


def load_into_local(socket: Path = local.CONTAINERD_SOCKET) -> None:
    """Load the images into the node whose containerd has this socket."""
    runtime = Containerd("ctr", "--address", socket)
    for key, image in IMAGES.items():
        target = f"{image.repository}:{loaded_tag(key, docker=False)}"
        digest = f"sha256:{image_id(image, docker=False)}"
        with announced(f"images: bringing {target} to the node"):
            runtime.add_image(target, buildah.read_image(image.name))
        if runtime.image_id(target) != digest:
            raise RuntimeError(f"{target} on the node is not the one that was built")
        runtime.tag_image(target, image.loaded_last)


def bring_to_kind(name: str, dockerfile: Path) -> None:
    node = kind.NODES["engine"]
    if not Containerd("docker", "exec", node, "ctr").has_image(name):
        build_with_docker(name, dockerfile)
        with announced(f"images: bringing {name} to the node"):
            _stream(name, name, node)


def bring_to_local(name: str, dockerfile: Path) -> None:
    runtime = Containerd("ctr", "--address", local.CONTAINERD_SOCKET)
    if not runtime.has_image(name):
        buildah.build(name, dockerfile)
        try:
            with announced(f"images: bringing {name} to the node"):
                runtime.add_image(name, buildah.read_image(name))
        finally:
            buildah.remove(name)


def _stream(name: str, target: str, node: str) -> None:
    """Stream an image from Docker into the node, without the file that `kind load docker-image` writes (6 GB)."""
    programs.run("docker", "tag", name, target, check=True)
    save = programs.start("docker", "save", target, stdout=subprocess.PIPE)
    load = ("load", "image-archive", "/dev/stdin", "--name", kind.NAME, "--nodes", node)
    loaded = programs.run("kind", *load, stdin=save.stdout)
    assert save.stdout is not None
    save.stdout.close()  # so that `docker save` ends if kind has failed
    save.wait()
    programs.run("docker", "rmi", target, stdout=subprocess.DEVNULL)  # removes only the name
    loaded.check_returncode()
    if save.returncode:
        raise subprocess.CalledProcessError(save.returncode, save.args)
