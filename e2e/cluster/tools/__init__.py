"""Builds the programs of Kubernetes from a Go module, once, into the cache folder.

Called by `python -m e2e.cluster tools` and by whoever needs a program: `binary("kubectl")`.
Standard library only: it runs before the virtual environment exists. Knows nothing of clusters.

This folder is the Go module too: one for all programs, so that what they share has one version and is compiled
once. They go to `<cache>/tools/<hash of the module>/`, so that a new version never meets an old one. An interrupted
build goes on from the packages that it has compiled.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from e2e.cluster.paths import CACHE

MODULE = Path(__file__).parent
KUBERNETES_VERSION = "1.37.1"

_KUBERNETES = "k8s.io/kubernetes/cmd/"
_VERSION_PACKAGE = "k8s.io/component-base/version"
_PROGRESS_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Tool:
    """One program: its name and the Go package that is its `main`."""

    name: str
    package: str

    @property
    def path(self) -> Path:
        return _folder() / self.name

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


class ToolMissing(RuntimeError):
    """A program is not there; the message names what builds it, or what is needed for that."""


def module_hash() -> str:
    """Identity of the module: what is pinned in it and our own programs, byte for byte."""
    digest = hashlib.sha256()
    for file in [*sorted(MODULE.glob("go.*")), *sorted(MODULE.glob("*/*.go"))]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _folder() -> Path:
    return CACHE / "tools" / module_hash()


def binary(name: str) -> Path:
    """Path of a built program, or of a client on the PATH that was not built; `ToolMissing` if it is not there."""
    tool = next(tool for tool in TOOLS if tool.name == name)
    if tool.path.exists():
        return tool.path
    if name in CLIENTS and (found := shutil.which(name)):
        return Path(found)
    raise ToolMissing(f"{name} is not built: run `make tools`")


def search_path() -> str:
    """PATH with the built programs in front."""
    return os.pathsep.join([str(TOOLS[0].path.parent), os.environ.get("PATH", "")])


def build_missing() -> None:
    """Builds what is not there; `ToolMissing` without Go."""
    missing = [tool for tool in TOOLS if not tool.path.exists()]
    if missing and shutil.which("go") is None:
        raise ToolMissing("Go is needed to build Kubernetes: install Go >= 1.26")
    _build_all(missing)


def provide_clients() -> None:
    """Builds `CLIENTS` where Go is there, else takes them from the PATH; `ToolMissing` where neither can be."""
    if shutil.which("go") is not None:
        _build_all([tool for tool in TOOLS if tool.name in CLIENTS and not tool.path.exists()])
        return
    try:
        for name in CLIENTS:
            binary(name)
    except ToolMissing:
        raise ToolMissing(f"{' and '.join(CLIENTS)} are needed: install them, or Go >= 1.26") from None


def _build_all(missing: Sequence[Tool]) -> None:
    """In one go, so that one program is linked while another is compiled; drops the compiler's caches at the end."""
    if not missing:
        return
    print(f"building {', '.join(tool.name for tool in missing)}: fetching their modules ...", flush=True)
    started = time.monotonic()
    packages = [tool.package for tool in missing]
    listed = subprocess.run(["go", "list", "-deps", *packages], stdout=subprocess.PIPE, check=True, **_in_module())
    partial = _folder() / "partial"
    # Nobody debugs them: without that information a package is compiled in an eighth less time.
    flags = ["-v", "-trimpath", "-gcflags=all=-dwarf=false", f"-ldflags={_linker_flags()}", "-o", f"{partial}/"]
    with subprocess.Popen(["go", "build", *flags, *packages], stderr=subprocess.PIPE, **_in_module()) as compiler:
        assert compiler.stderr is not None
        _show_progress(compiler.stderr, len(listed.stdout.split()))
    if compiler.returncode:
        raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
    for tool in missing:
        (partial / tool.built_as).rename(tool.path)
    shutil.rmtree(partial)
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    # They take 9 GB and serve nothing once the programs are built.
    shutil.rmtree(CACHE / "go", ignore_errors=True)


def _show_progress(lines: Iterable[str], total: int) -> None:
    """Counts the packages that `go build -v` names; whatever else it says is passed on."""
    num_compiled, shown = 0, time.monotonic()
    for line in lines:
        if re.fullmatch(r"[^\s:]+\n", line) is None:
            sys.stderr.write(line)
            continue
        num_compiled += 1
        if time.monotonic() - shown > _PROGRESS_SECONDS:
            print(f"compiled {num_compiled} of {total} packages", flush=True)
            shown = time.monotonic()


def _in_module() -> dict[str, Any]:
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOFLAGS": "-modcacherw -buildvcs=false -mod=readonly",
        "GOCACHE": str(CACHE / "go" / "build"),
        "GOMODCACHE": str(CACHE / "go" / "modules"),
    }
    return {"cwd": MODULE, "env": environment, "text": True}


def _linker_flags() -> str:
    # Without these, clients see version v0.0.0-master and refuse some features.
    major, minor, _ = KUBERNETES_VERSION.split(".")
    values = {"gitVersion": f"v{KUBERNETES_VERSION}", "gitMajor": major, "gitMinor": minor}
    return " ".join(["-s -w", *(f"-X {_VERSION_PACKAGE}.{key}={value}" for key, value in values.items())])
