"""Builds the programs of Kubernetes from Go modules, once, into the cache folder.

Called by `python -m e2e.cluster tools` and by whoever needs a program: `binary("kubectl")`.
Standard library only: it runs before the virtual environment exists. Knows nothing of clusters.

Every folder here is a Go module that pins one tool; its binaries go to
`<cache>/tools/<module>-<hash of the folder>/`, so a finished binary survives an interrupted build
and a new version never meets an old binary.
"""

import hashlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.paths import CACHE

MODULES = Path(__file__).parent
KUBERNETES_VERSION = "1.37.1"

_KUBERNETES = "k8s.io/kubernetes/cmd/"
_VERSION_PACKAGE = "k8s.io/component-base/version"


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: its name, the module folder that pins it and the Go package that is its `main`."""

    name: str
    module: str
    package: str

    @property
    def path(self) -> Path:
        return CACHE / "tools" / f"{self.module}-{module_hash(self.module)}" / self.name


# In the order of need: an interrupted build leaves the useful ones.
TOOLS = (
    Tool("kube-apiserver", "kubernetes", _KUBERNETES + "kube-apiserver"),
    Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3"),
    Tool("kube-controller-manager", "kubernetes", _KUBERNETES + "kube-controller-manager"),
    Tool("kubectl", "kubernetes", _KUBERNETES + "kubectl"),
    Tool("kube-scheduler", "kubernetes", _KUBERNETES + "kube-scheduler"),
    Tool("kubelet", "kubernetes", _KUBERNETES + "kubelet"),
    Tool("kube-proxy", "kubernetes", _KUBERNETES + "kube-proxy"),
    Tool("pause", "pause", "."),
    Tool("helm", "helm", "helm.sh/helm/v4/cmd/helm"),
    Tool("coredns", "coredns", "github.com/coredns/coredns"),
    Tool("kubeconform", "kubeconform", "github.com/yannh/kubeconform/cmd/kubeconform"),
)


class ToolMissing(RuntimeError):
    """A program is not built yet; the message names the command that builds it."""


def module_hash(module: str) -> str:
    """Identity of a module folder: what is pinned in it, byte for byte."""
    digest = hashlib.sha256()
    for file in sorted((MODULES / module).iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def binary(name: str) -> Path:
    """Path of a built program; `ToolMissing` if it is not there."""
    tool = next(tool for tool in TOOLS if tool.name == name)
    if not tool.path.exists():
        raise ToolMissing(f"{name} is not built: run `make tools`")
    return tool.path


def search_path() -> str:
    """PATH with the built programs in front."""
    folders = dict.fromkeys(str(tool.path.parent) for tool in TOOLS)
    return os.pathsep.join([*folders, os.environ.get("PATH", "")])


def build_missing() -> None:
    """Builds what is not there, one program after the other, and drops the compiler's caches at the end."""
    missing = [tool for tool in TOOLS if not tool.path.exists()]
    if not missing:
        return
    if shutil.which("go") is None:
        raise ToolMissing("Go is needed to build Kubernetes: install Go >= 1.26")
    for number, tool in enumerate(missing, start=1):
        print(f"building {tool.name} ({number} of {len(missing)}) ...", flush=True)
        started = time.monotonic()
        _build(tool)
        print(f"built {tool.name} in {time.monotonic() - started:.0f} s", flush=True)
    # They take 9 GB and serve nothing once every program is built.
    shutil.rmtree(CACHE / "go", ignore_errors=True)


def _build(tool: Tool) -> None:
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-modcacherw -buildvcs=false -mod=readonly",
        "GOCACHE": str(CACHE / "go" / "build"),
        "GOMODCACHE": str(CACHE / "go" / "modules"),
    }
    partial = tool.path.with_suffix(".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["go", "build", "-trimpath", "-ldflags", _linker_flags(tool), "-o", partial, tool.package],
        cwd=MODULES / tool.module,
        env=environment,
        check=True,
    )
    partial.rename(tool.path)


def _linker_flags(tool: Tool) -> str:
    if tool.module != "kubernetes":
        return "-s -w"
    # Without these, clients see version v0.0.0-master and refuse some features.
    major, minor, _ = KUBERNETES_VERSION.split(".")
    values = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{key}={value}" for key, value in values.items())])
