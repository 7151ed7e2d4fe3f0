"""`python -m e2e.cluster`: the cluster from the command line, for the Makefile and for people.

The provider is `kind` where a Docker daemon and kind answer, else `local`; the variable CLUSTER=local|kind decides.
Errors that a person can mend are printed as one sentence; everything else keeps its traceback.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

from e2e.cluster import debian, images, kind, load, local, tools


def build_tools() -> None:
    """build Kubernetes, etcd, Helm and CoreDNS from Go modules, once"""
    tools.build_missing()
    if provider() is local:
        try:
            debian.require(debian.CLUSTER_PACKAGES)
        except debian.PackagesMissing as error:  # a whole cluster needs them, tests without pods do not
            print(f"for `make cluster`: {error}", flush=True)


def build_images() -> None:
    """build the control and the engine image"""
    images.build_all()


def up() -> None:
    """bring up the cluster and print its KUBECONFIG"""
    if provider() is local:
        if os.geteuid() != 0:
            raise debian.PackagesMissing("the local cluster needs root: use sudo, or Docker and kind (CLUSTER=kind)")
        debian.require(debian.CLUSTER_PACKAGES)
    provider().up()
    print(f"export KUBECONFIG={provider().KUBECONFIG}")


def down() -> None:
    """remove every trace of the cluster"""
    provider().down()


def status() -> None:
    """say whether the cluster runs; the exit code is 1 if not"""
    if not provider().running():
        print(f"{provider().CONTEXT} is down")
        sys.exit(1)
    print(f"{provider().CONTEXT} is up\nexport KUBECONFIG={provider().KUBECONFIG}")


def kubeconfig() -> None:
    """print the path of the cluster's kubeconfig"""
    print(provider().KUBECONFIG)


def load_images() -> None:
    """bring the built images to the cluster's nodes"""
    if provider() is local:
        load.load_into_local()
    else:
        load.load_into_kind()


COMMANDS: dict[str, Callable[[], None]] = {
    "tools": build_tools,
    "images": build_images,
    "up": up,
    "load": load_images,
    "status": status,
    "kubeconfig": kubeconfig,
    "down": down,
}


def provider() -> ModuleType:
    wanted = os.environ.get("CLUSTER") or ("kind" if kind.available() else "local")
    return {"kind": kind, "local": local}[wanted]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        choices.add_parser(name, help=function.__doc__)
    command = parser.parse_args().command
    if os.environ.get("CLUSTER", "") not in ("", "kind", "local"):
        parser.error("CLUSTER must be local or kind")
    try:
        COMMANDS[command]()
    except (debian.PackagesMissing, tools.ToolMissing, images.ImageMissing) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
