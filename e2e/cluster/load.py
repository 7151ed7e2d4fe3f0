"""Brings the built images to the nodes of the running cluster, as little of them as possible.

Called by `python -m e2e.cluster load`. An image counts as loaded when the digest of its configuration is the one
that was built, never by its name; layers that the node has are not copied again.
"""

import json
import subprocess
import tempfile
import time
import tomllib
from pathlib import Path

from e2e.cluster import buildah, kind, local
from e2e.cluster.containerd import BLOBS, Containerd
from e2e.cluster.images import IMAGES, image_id, loaded_tag
from e2e.cluster.paths import CACHE, REPOSITORY

# The chart's default tag, so that its plain `helm install` finds on the nodes what was built here.
VERSION = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]


def load_into_kind() -> None:
    names = []
    for key, image in IMAGES.items():
        for tag in (loaded_tag(key, docker=True), VERSION):
            names.append(f"{image.repository}:{tag}")
            subprocess.run(["docker", "tag", image.name, names[-1]], check=True)
    subprocess.run(["kind", "load", "docker-image", "--name", kind.NAME, *names], check=True)


def load_into_local() -> None:
    runtime = Containerd(local.CONTAINERD_SOCKET)
    for key, image in IMAGES.items():
        target = f"{image.repository}:{loaded_tag(key, docker=False)}"
        digest = f"sha256:{image_id(image, docker=False)}"
        if runtime.image_id(target) == digest:
            print(f"{target} is loaded already", flush=True)
        else:
            _load(image.name, target, digest, runtime)
        runtime.tag_image(target, f"{image.repository}:{VERSION}")


def _load(name: str, target: str, digest: str, runtime: Containerd) -> None:
    print(f"loading {target} ...", flush=True)
    started = time.monotonic()
    _copy(name, target, runtime)
    if runtime.image_id(target) != digest:
        raise RuntimeError(f"{target} on the node is not the one that was built")
    print(f"loaded {target} in {time.monotonic() - started:.0f} s", flush=True)


def _copy(name: str, target: str, runtime: Containerd) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="load-") as folder:
        layout = Path(folder)
        blobs = layout / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in (BLOBS / "sha256").iterdir():  # same form on both sides: a file named by its digest
            (blobs / blob.name).symlink_to(blob)
        buildah.export(name, layout)
        index = json.loads((layout / "index.json").read_text())
        index["manifests"][0]["annotations"] = {"io.containerd.image.name": target}
        (layout / "index.json").write_text(json.dumps(index))
        runtime.import_layout(layout)
