"""Controls the container runtime of a node: its image store, and what a dead containerd of the local cluster leaves.

Called by `local`, `load` and `preflight`. Everything is in the namespace of the kubelet's images.
"""

import contextlib
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Collection
from pathlib import Path

from e2e.cluster import programs
from e2e.cluster.buildah import Stored
from e2e.cluster.tools import binary

_KEPT = "containerd.io/gc.root"  # the label that `ctr` gives to what it makes, which is then never deleted


class Containerd:
    """A running containerd. `client` is the command line that reaches it; its first word is a program of `programs`."""

    def __init__(self, *client: str | Path) -> None:
        program, *arguments = map(str, client)
        self._client = (program, *arguments, "--namespace", "k8s.io")

    def ready(self) -> bool:
        return programs.run(*self._client, "version", capture_output=True).returncode == 0

    def forget_containers(self) -> bool:
        """Remove the records of containers of an earlier cluster. Returns whether there were any."""
        left = self._run("containers", "ls", "--quiet").split()
        if left:
            self._run("containers", "rm", *left)
        return bool(left)

    def has_image(self, name: str) -> bool:
        return name in self._run("images", "ls", "--quiet", f"name=={name}").split()

    def image_id(self, name: str) -> str:
        """Return the identity of an image (the digest of its configuration); empty if it does not exist."""
        lines = [line.split() for line in self._run("images", "ls", f"name=={name}").splitlines()[1:]]
        if not lines:
            return ""
        manifest = json.loads(self._run("content", "get", lines[0][2]))
        return str(manifest["config"]["digest"])

    def tag_image(self, name: str, other: str) -> None:
        """Give an image a second name. If another image had that name, it loses it."""
        self._run("images", "tag", "--force", name, other)

    def keep_images(self, names: Collection[str]) -> None:
        """Remove all images except those with these names, and wait until their layers are gone.

        An image also has the kubelet's name for it, which is its id. Its layers are removed only when it has no name
        left.
        """
        digests = {line.split()[0]: line.split()[2] for line in self._run("images", "ls").splitlines()[1:]}
        kept = {digests.get(name) for name in names}
        if old := [name for name, digest in digests.items() if digest not in kept]:
            self._run("images", "rm", "--sync", *old)

    def add_image(self, name: str, image: Stored) -> None:
        """Add an image of buildah's store.

        Each layer becomes a snapshot whose files are hard links, since nothing writes to the files of a layer. The
        archives of the layers, from which a runtime usually unpacks the snapshots, are not needed.
        """
        present = {line.split()[0] for line in self._run("snapshots", "ls").splitlines()[1:]}
        chain = ""
        for layer in image.layers:
            parent, chain = chain, _chain_id(chain, layer.digest)
            if chain not in present:
                self._link_layer(layer.folder, parent, chain)
        programs.run(
            *self._client, "images", "import", "-", input=_image_archive(name, image), check=True, capture_output=True
        )
        for chain in {line.split()[0] for line in self._run("snapshots", "ls").splitlines()[1:]} - present:
            self._run("snapshots", "label", chain, f"{_KEPT}=")  # from now on the image keeps it

    def _link_layer(self, folder: Path, parent: str, chain: str) -> None:
        key = f"conveyor-{chain}"
        programs.run(*self._client, "snapshots", "rm", key, capture_output=True)  # of an interrupted call
        self._run("snapshots", "prepare", key, *([parent] if parent else []))
        mount = self._run("snapshots", "mounts", "/nowhere", key)
        found = re.search(r"upperdir=([^,\s]+)|-t bind (\S+)", mount)
        assert found, mount
        files = f"{folder}/.", found[1] or found[2]
        if programs.run("cp", "--archive", "--link", *files, capture_output=True).returncode:
            # Another file system, or a running build, which mounts the store.
            programs.run("cp", "--archive", "--reflink=auto", "--remove-destination", *files, check=True)
        self._run("snapshots", "commit", chain, key)

    def import_pause_image(self, name: str) -> None:
        """Import the image that holds a pod's namespaces. It consists of one static program."""
        if not self.image_id(name):
            archive = _pause_archive(name)
            programs.run(*self._client, "images", "import", "-", input=archive, check=True, capture_output=True)

    def _run(self, *arguments: str) -> str:
        finished = programs.run(*self._client, *arguments, capture_output=True, text=True)
        if finished.returncode:
            raise RuntimeError(f"ctr {' '.join(arguments)} failed: {finished.stderr.strip()}")
        return finished.stdout


def remove_shim_sockets(state: Path) -> None:
    """Remove the sockets of a dead containerd's shims, which are at a fixed place outside its state folder."""
    for bundle in state.glob("io.containerd.runtime.v2.task/*/*"):
        for note in ("address", "bootstrap.json"):
            with contextlib.suppress(FileNotFoundError):
                for socket in re.findall(r'unix://([^"\s]+)', (bundle / note).read_text()):
                    Path(socket).unlink(missing_ok=True)


def _chain_id(parent: str, digest: str) -> str:
    """Return the name of a layer's snapshot: the layer's digest, or a digest of it and of the layer below it."""
    return f"sha256:{hashlib.sha256(f'{parent} {digest}'.encode()).hexdigest()}" if parent else digest


def _image_archive(name: str, image: Stored) -> bytes:
    """Return an OCI layout with the documents of an image, without its layers."""
    blobs = [document.encode() for document in (image.manifest, image.configuration)]
    digests = [hashlib.sha256(blob).hexdigest() for blob in blobs]
    described = {
        "mediaType": json.loads(image.manifest)["mediaType"],
        "digest": f"sha256:{digests[0]}",
        "size": len(blobs[0]),
        "annotations": {"io.containerd.image.name": name},
    }
    return _tar(
        {
            "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
            "index.json": json.dumps({"schemaVersion": 2, "manifests": [described]}).encode(),
            **{f"blobs/sha256/{digest}": blob for digest, blob in zip(digests, blobs, strict=True)},
        }
    )


def _pause_archive(name: str) -> bytes:
    program = binary("pause").read_bytes()
    layer = _tar({"pause": program})
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    return _tar(
        {
            "layer.tar": layer,
            "config.json": json.dumps(config).encode(),
            "manifest.json": json.dumps(manifest).encode(),
        }
    )


def _tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()
