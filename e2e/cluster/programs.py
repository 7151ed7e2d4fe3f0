"""Lists all programs that this package runs, and is the only module that runs them.

A program comes from a Debian package, which is installed when it is needed, or it is built (`tools`), or the user
installs it. Python is the one that runs this module, and uv comes from `make venv`. No other program can be run by its
name. So no program is run before it is installed. A test checks that no other module starts processes. Standard library
only: `preflight` runs before the virtual environment exists.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from e2e.cluster.paths import CACHE
from e2e.cluster.tools import ALL, ProgramMissing, binary

# The package of each program. The kubelet and containerd run some of them themselves.
DEBIAN_PACKAGES = {
    "aarch64-linux-gnu-gcc": "crossbuild-essential-arm64",
    "buildah": "buildah",
    "chroot": "coreutils",
    "conntrack": "conntrack",
    "cp": "coreutils",
    "du": "coreutils",
    "containerd": "containerd",
    "ctr": "containerd",
    "debootstrap": "debootstrap",
    "ethtool": "ethtool",
    "git": "git",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "/usr/lib/cni/ptp": "containernetworking-plugins",
    "qemu-aarch64-static": "qemu-user-static",
    "runc": "runc",
    "skopeo": "skopeo",
    "socat": "socat",
    "umount": "mount",
    "unshare": "util-linux",
}
INSTALLED_BY_PEOPLE = {
    "docker": "Docker is needed: install it, or use the local cluster (CLUSTER=local, as root on Debian)",
    "kind": "kind is needed: install it, or use the local cluster (CLUSTER=local, as root on Debian)",
    "go": "Go is needed to build Kubernetes: install Go 1.26 or newer",
    "node": "Node.js is needed for a client and for the browser: install Node.js 20 or newer",
    **dict.fromkeys(
        ("java", "javac", "mvn"), "Java clients need a JDK and Maven: install JDK 17 or newer, and Maven 3"
    ),
    "cargo": "Rust is needed for one of the clients: install Rust 1.85 or newer with cargo",
    "npm": "npm is needed for a client and for the browser: install Node.js 20 or newer with npm",
}
# Programs for a local cluster, and for building its images.
CLUSTER = (
    "containerd", "runc", "/usr/lib/cni/ptp", "conntrack", "ethtool", "ip", "iptables", "nft", "nsenter", "socat",
    "umount", "unshare"
)  # fmt: skip
IMAGES = ("buildah", "debootstrap")
CLIENTS = ("node", "npm", "java", "javac", "mvn", "cargo")
ARM64 = ("aarch64-linux-gnu-gcc", "qemu-aarch64-static")

# Debian's folders for root's programs, which are not on every PATH.
_OF_ROOT = os.pathsep.join(["/usr/local/sbin", "/usr/sbin", "/sbin"])


class ProgramFailed(RuntimeError):
    """A program ended with an exit code other than 0."""


def run(program: str | Path, *arguments: str | Path, **options: Any) -> "subprocess.CompletedProcess[Any]":
    """Call `subprocess.run` for a known program. A Path is a program that the caller has installed with a known one."""
    return subprocess.run(command(program, *arguments), **options)


def run_quietly(program: str, *arguments: str | Path) -> str:
    """Run a program and return its standard output. Raises ProgramFailed with the end of its output."""
    environment = {**os.environ, "LC_ALL": "C"}
    done = run(program, *arguments, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise ProgramFailed(f"{' '.join(done.args)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return str(done.stdout)


def start(program: str | Path, *arguments: str | Path, **options: Any) -> "subprocess.Popen[Any]":
    """Call `subprocess.Popen` for a known program."""
    return subprocess.Popen(command(program, *arguments), **options)


def command(program: str | Path, *arguments: str | Path) -> list[str]:
    """Return the command line of a program, and install it if necessary. Raises `ProgramMissing`."""
    return [str(program) if isinstance(program, Path) else path(program), *map(str, arguments)]


def path(program: str) -> str:
    if program == "python":
        return sys.executable
    if program == "uv":
        return _uv()
    if program in ALL:
        return str(binary(program))
    if program not in DEBIAN_PACKAGES and program not in INSTALLED_BY_PEOPLE:
        raise LookupError(f"{program} is in none of the tables of e2e.cluster.programs")
    require(program)
    place = found(program)
    assert place is not None, f"{program} is not in its package"
    return place


def _uv() -> str:
    """Return the uv that `make venv` keeps in the cache."""
    kept = sorted(CACHE.glob("uv-*/bin/uv"))
    if not kept:
        raise ProgramMissing('uv is not in the cache: run "make venv"')
    return str(kept[-1])


def found(program: str) -> str | None:
    """Return the path of a program that is already installed; None if it is not."""
    return shutil.which(program, path=search_path())


def search_path() -> str:
    return os.pathsep.join([os.environ.get("PATH", ""), _OF_ROOT])


def require(*programs: str) -> None:
    """Make sure that all programs are installed.

    Installs missing packages, or raises `ProgramMissing` for all of them.
    """
    absent = [program for program in programs if found(program) is None]
    refusals = [INSTALLED_BY_PEOPLE[program] for program in absent if program in INSTALLED_BY_PEOPLE]
    packages = sorted({DEBIAN_PACKAGES[program] for program in absent if program not in INSTALLED_BY_PEOPLE})
    if packages and not _can_install():
        refusals.append(f"missing programs; on Debian, as root: {' '.join(_apt_get(packages))}")
    if refusals:
        raise ProgramMissing("\n".join(refusals))
    if packages:
        _install(packages)


def _can_install() -> bool:
    return os.geteuid() == 0 and Path("/etc/debian_version").exists() and shutil.which("apt-get") is not None


def _apt_get(packages: Iterable[str]) -> list[str]:
    return ["apt-get", "install", "--yes", "--no-install-recommends", *packages]


def _install(packages: list[str]) -> None:
    print(f"installing Debian packages: {' '.join(packages)} ...", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patience = ["-o", "DPkg::Lock::Timeout=300"]  # another installation may be running
    for step in (["apt-get", "update"], _apt_get(packages)):
        done = subprocess.run(
            [*step, *patience], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment,
        )  # fmt: skip
        if done.returncode:
            raise ProgramMissing(f"{' '.join(step)} failed:\n{done.stdout[-2000:]}")
