"""Builds containerd 2, which mounts images as volumes, and a registry to pull images from, from their Go modules.

`make oci` builds the programs once and puts them before Debian's on the PATH. Debian's containerd 1.6 mounts no images.
"""

import contextlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e import go_module, kube
from e2e.cluster import local, programs
from e2e.cluster.paths import CACHE
from e2e.cluster.progress import announced

VERSION = "2.4.2"
FOLDER = CACHE / f"containerd-{VERSION}"
_CONTAINERD = "github.com/containerd/containerd/v2/cmd/"
_REGISTRY = "github.com/google/go-containerregistry/cmd/registry@v0.22.1"
# One `go install` for each list: all its packages must be of one module.
_PACKAGES = (
    [f"{_CONTAINERD}{name}@v{VERSION}" for name in ("containerd", "containerd-shim-runc-v2", "ctr")],
    [_REGISTRY],
)
_PARTIAL = FOLDER / "partial"
_COMPLETE = FOLDER / ".complete"
_DOCKERFILE = "FROM scratch\nCOPY model/ /models/\n"  # as docs/models.md has it


def check_cluster() -> None:
    """Raise ProgramMissing if the running cluster has another containerd, with which these programs cannot work."""
    if not local.CONTAINERD_SOCKET.exists():
        return
    versions = programs.run(
        "ctr", "--address", local.CONTAINERD_SOCKET, "version", capture_output=True, text=True
    ).stdout
    server = re.search(r"Server:\s+Version:\s+(\S+)", versions)
    if server and not server[1].startswith(VERSION):
        raise programs.ProgramMissing(
            f"the local cluster that is up runs containerd {server[1]}, and this needs one that runs {VERSION}: "
            "`make cluster-down` first"
        )


def build() -> None:
    if _COMPLETE.exists():
        return
    environment = go_module.build_environment(_PARTIAL / "modules")
    environment |= {"GOBIN": str(FOLDER), "GOCACHE": str(_PARTIAL / "build"), "CGO_ENABLED": "0"}
    with announced(f"containerd {VERSION}: building it, which takes a core 5 minutes"):
        for packages in _PACKAGES:
            programs.run("go", "install", "-trimpath", "-ldflags=-s -w", *packages, env=environment, check=True)
    shutil.rmtree(_PARTIAL)
    _COMPLETE.touch()


@dataclass(frozen=True, slots=True)
class Registry:
    """A running registry on localhost, from where containerd pulls by plain HTTP without configuration."""

    address: str
    log: Path
    folder: Path

    def push(self, model: Path, name: str) -> str:
        """Pack the folder of a model as the documentation says, and push it. Returns the image's digest."""
        shutil.copytree(model, self.folder / "model")
        (self.folder / "Dockerfile").write_text(_DOCKERFILE)
        store = ("--storage-driver", "vfs", "--root", self.folder / "store", "--runroot", self.folder / "run")
        digest = self.folder / "digest"
        programs.run_quietly("buildah", *store, "build", "--isolation", "chroot", "--tag", "model", self.folder)
        target = f"docker://{self.address}/{name}"
        programs.run_quietly("buildah", *store, "push", "--tls-verify=false", "--digestfile", digest, "model", target)
        return digest.read_text()

    def num_requests(self) -> int:
        return len(re.findall(r" [A-Z]+ /v2/", self.log.read_text()))


@contextlib.contextmanager
def running_registry(folder: Path) -> Iterator[Registry]:
    log = folder / "registry.log"
    with log.open("w") as stderr:
        process = programs.start(FOLDER / "registry", "-port", "0", stderr=stderr)
    try:
        port = kube.wait_until("the registry", lambda: re.search(r"serving on port (\d+)", log.read_text()))[1]
        yield Registry(f"localhost:{port}", log, folder)
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):
            check_cluster()
            build()
    except programs.ProgramMissing as error:
        sys.exit(str(error))
    print(FOLDER)
