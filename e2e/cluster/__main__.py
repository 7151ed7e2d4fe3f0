"""`python -m e2e.cluster`: the command line for the cluster, used by the Makefile and by people.

CLUSTER=local|kind chooses the provider; `provider` defines the default. Only one command at a time changes a cluster.
Errors that a user can fix are printed as one sentence. All others keep their traceback.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable

from e2e.cluster import images, load, local, programs, provider
from e2e.cluster.lock import exclusive
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.tools import ProgramMissing, folder


class NoCluster(RuntimeError):
    """The command needs a cluster, and none is up."""


def build_images() -> None:
    """build the control and the engine image"""
    images.build_all(provider.builds_with_docker())


def up() -> None:
    """bring up the cluster and print its KUBECONFIG"""
    with exclusive():
        chosen = provider.addressed()
        if chosen is local:
            _require_root()
        chosen.up()
    print(f"export KUBECONFIG={chosen.KUBECONFIG}")


def down() -> None:
    """remove every trace of the cluster; if something is left, fail and name it"""
    with exclusive():
        for existing in provider.existing():
            if existing is local:
                _require_root()
            existing.down()
    size = programs.run("du", "-s", "--block-size=1GB", CACHE, capture_output=True, text=True).stdout.split()
    print("No cluster is up. Programs, images and the demo's model stay, so that the next one is there in minutes:")
    print(f"{size[0] if size else '?'} GB in {CACHE}; rm -r takes them away.")


def status() -> None:
    """say whether the cluster runs; the exit code is 1 if not"""
    chosen = provider.addressed()
    if not chosen.running():
        print(f"{chosen.CONTEXT} is down")
        sys.exit(1)
    print(f"{chosen.CONTEXT} is up\nexport KUBECONFIG={chosen.KUBECONFIG}")


def kubeconfig() -> None:
    """print the path of the cluster's kubeconfig"""
    print(provider.addressed().KUBECONFIG)


def env() -> None:
    """print the shell commands by which kubectl, helm and the plugin find the cluster that is up"""
    chosen = provider.addressed()
    if not chosen.running():
        raise NoCluster("no cluster is up: `make demo` or `make cluster` brings one up")
    print(f"export KUBECONFIG={chosen.KUBECONFIG}")
    print(f'export PATH="{folder()}:$PATH:{REPOSITORY}/.venv/bin"')


def load_images() -> None:
    """bring the built images to the nodes of KUBECONFIG's cluster (without KUBECONFIG, of the one that is up)"""
    with exclusive():
        if provider.of_kubeconfig() is local:
            load.load_into_local()
        else:
            load.load_into_kind()


def _require_root() -> None:
    if os.geteuid() != 0:
        raise ProgramMissing("the local cluster needs root: use sudo, or Docker and kind (CLUSTER=kind)")


COMMANDS: dict[str, Callable[[], None]] = {
    "images": build_images,
    "up": up,
    "load": load_images,
    "status": status,
    "kubeconfig": kubeconfig,
    "env": env,
    "down": down,
}


TO_MEND = (ProgramMissing, NoCluster, images.ImageMissing, local.NotStarted, local.TracesLeft, provider.ContextRefused)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m e2e.cluster", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    choices = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, function in COMMANDS.items():
        choices.add_parser(name, help=function.__doc__)
    command = parser.parse_args().command
    if os.environ.get("CLUSTER", "") not in ("", *provider.PROVIDERS):
        parser.error("CLUSTER must be local or kind")
    try:
        COMMANDS[command]()
    except TO_MEND as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
