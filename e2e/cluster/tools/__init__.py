"""The programs of Kubernetes that are built here: which they are, what pins them, and where they lie once built.

Called by whoever needs one: `binary("kubectl")`. `build` makes them. Standard library only: it runs before the
virtual environment exists. Knows nothing of clusters.

This folder is the Go module too: one for all programs, so that what they share has one version and is compiled
once. They go to `<cache>/tools/<hash of the module>/`, so that a new version never meets an old one.
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
        """The name that `go build` gives the program: the package's last word that is no major version."""
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


# What people have of their own too, and what a cluster that is not built here is used with.
CLIENTS = ("kubectl", "helm")
ALL = tuple(tool.name for tool in TOOLS)
CLUSTER = tuple(name for name in ALL if name != "kubeconform")  # that one checks the chart, in tests


class ProgramMissing(RuntimeError):
    """A program is not there; the message says how to have it."""


def module_hash() -> str:
    """Identity of the module: what is pinned in it and our own programs, byte for byte."""
    digest = hashlib.sha256()
    for file in [*sorted(MODULE.glob("go.*")), *sorted(MODULE.glob("*/*.go"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def folder() -> Path:
    return CACHE / "tools" / module_hash()


def tool_named(name: str) -> Tool:
    return next(tool for tool in TOOLS if tool.name == name)


def binary(name: str) -> Path:
    """Path of a built program, or of a client on the PATH that was not built; `ProgramMissing` if it is not there."""
    tool = tool_named(name)
    if tool.path.exists():
        return tool.path
    if name in CLIENTS and (found := shutil.which(name)):
        return Path(found)
    raise ProgramMissing(f"{name} is not built: run `make tools`")


def search_path() -> str:
    """PATH with the built programs in front, for people's commands."""
    return os.pathsep.join([str(TOOLS[0].path.parent), os.environ.get("PATH", "")])
