"""Defines the programs of Kubernetes that are built here: their versions, and their paths once built.

`binary("kubectl")` returns a path. `build` builds the programs. Standard library only, because it runs before the
virtual environment exists. Knows nothing of clusters.

This folder is also the Go module: one for all programs, so that they share dependencies in one version, which are
compiled once. The programs are in `<cache>/tools/<hash of the module>/`, so that new versions never mix with old ones.
"""

import hashlib
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import CACHE

MODULE = Path(__file__).parent

_KUBERNETES = "k8s.io/kubernetes/cmd/"


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: its name and the Go package that is its `main`."""

    name: str
    package: str

    @property
    def path(self) -> Path:
        return folder() / self.name

    @property
    def built_as(self) -> str:
        """Return the name that `go build` gives the program: the last part of the package, without a major version."""
        return re.sub(r"/v\d+$", "", self.package).rsplit("/", 1)[-1]


TOOLS = (
    Tool("kube-apiserver", _KUBERNETES + "kube-apiserver"),
    Tool("etcd", "go.etcd.io/etcd/server/v3"),
    Tool("kube-controller-manager", _KUBERNETES + "kube-controller-manager"),
    Tool("kubectl", _KUBERNETES + "kubectl"),
    Tool("kube-scheduler", _KUBERNETES + "kube-scheduler"),
    Tool("kubelet", _KUBERNETES + "kubelet"),
    Tool("kube-proxy", _KUBERNETES + "kube-proxy"),
    Tool("pause", "./pause"),
    Tool("helm", "helm.sh/helm/v4/cmd/helm"),
    Tool("coredns", "./coredns"),
    Tool("kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
)


# Programs that users may have installed themselves, and that clusters made elsewhere need.
CLIENTS = ("kubectl", "helm")
ALL = tuple(tool.name for tool in TOOLS)
CLUSTER = tuple(name for name in ALL if name != "kubeconform")  # kubeconform checks the chart in tests


class ProgramMissing(RuntimeError):
    """A program is not installed. The message says how to install it."""


def module_hash() -> str:
    """Return the hash of the module: of the pinned versions and of our own programs, byte for byte."""
    digest = hashlib.sha256()
    for file in [*sorted(MODULE.glob("go.*")), *sorted(MODULE.glob("*/*.go"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def folder() -> Path:
    return CACHE / "tools" / module_hash()


def tool_named(name: str) -> Tool:
    return next(tool for tool in TOOLS if tool.name == name)


def binary(name: str) -> Path:
    """Return the path of a built program, or of a client on the PATH that was not built. Raises `ProgramMissing`."""
    tool = tool_named(name)
    if tool.path.exists():
        return tool.path
    if name in CLIENTS and (found := shutil.which(name)):
        return Path(found)
    raise ProgramMissing(f"{name} is not built: run `make tools`")


def search_path() -> str:
    """Return PATH with the built programs in front, for users' commands."""
    return os.pathsep.join([str(TOOLS[0].path.parent), os.environ.get("PATH", "")])
