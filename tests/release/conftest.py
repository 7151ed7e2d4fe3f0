"""Publishes a release of two tiny images to a real registry, and signs it. Run by `make release-check`."""

import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.release.publishing import Key, Release, publish
from e2e.release.registry import running_registry


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("release")


@pytest.fixture(scope="module")
def key(folder: Path) -> Key:
    return Key.generate(folder)


@pytest.fixture(scope="module")
def registry(folder: Path) -> Iterator[str]:
    with running_registry(folder) as address:
        yield address


@pytest.fixture(scope="module")
def release(registry: str, folder: Path, key: Key) -> Release:
    images = {}
    for name in ("control", "engine"):
        (folder / f"{name}.cdx.json").write_text(json.dumps({"bomFormat": "CycloneDX", "specVersion": "1.5"}))
        images[name] = f"oci:{write_image(folder / name, name)}"
    return publish(registry, images, folder, key, folder)


def write_image(layout: Path, content: str) -> Path:
    """Write an OCI layout with an image of one file, and return its path."""
    blobs = layout / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def add(data: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        (blobs / digest).write_bytes(data)
        return {"mediaType": f"application/vnd.oci.image.{media_type}", "digest": f"sha256:{digest}", "size": len(data)}

    text, layer = layout / "text", layout / "layer.tar"
    text.write_text(content)
    with tarfile.open(layer, "w") as archive:
        archive.add(text, "text")
    described = add(layer.read_bytes(), "layer.v1.tar")
    root = {"type": "layers", "diff_ids": [described["digest"]]}
    configuration = add(json.dumps({"architecture": "amd64", "os": "linux", "rootfs": root}).encode(), "config.v1+json")
    manifest = {"schemaVersion": 2, "config": configuration, "layers": [described]}
    index = {"schemaVersion": 2, "manifests": [add(json.dumps(manifest).encode(), "manifest.v1+json")]}
    (layout / "index.json").write_text(json.dumps(index))
    (layout / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))
    return layout
