"""The Debian packages that a local cluster and image builds need: named, and installed when that is possible.

Called by the command line and `images`. Standard library only; knows no cluster.
"""

import os
import shutil
import subprocess
from pathlib import Path

# A program of each package, by which its presence is seen.
CLUSTER_PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "containernetworking-plugins": "/usr/lib/cni/ptp",
    "conntrack": "conntrack",
    "ethtool": "ethtool",
    "iproute2": "ip",
    "iptables": "iptables",
    "nftables": "nft",
    "socat": "socat",
}
IMAGE_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap", "skopeo": "skopeo"}


class PackagesMissing(RuntimeError):
    """Programs are missing; the message is the command that installs them."""


def require(packages: dict[str, str]) -> None:
    """Makes sure that the packages are there: installs them as root on Debian, else raises `PackagesMissing`."""
    missing = [package for package, program in packages.items() if shutil.which(program) is None]
    if not missing:
        return
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        raise PackagesMissing(f"missing programs; on Debian, as root: {' '.join(command)}")
    print(f"installing {' '.join(missing)} ...", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patience = ["-o", "DPkg::Lock::Timeout=300"]  # another installation may be under way
    for step in (["apt-get", "update"], command):
        subprocess.run([*step, *patience], check=True, stdout=subprocess.DEVNULL, env=environment)
