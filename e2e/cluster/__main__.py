"""`python -m e2e.cluster`: the cluster from the command line, for the Makefile and for people.

Errors that a person can mend are printed as one sentence; everything else keeps its traceback.
"""

import argparse
import subprocess
import sys

from e2e.cluster import debian, tools


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("tools", help="build Kubernetes, etcd, Helm and CoreDNS from Go modules, once")
    parser.parse_args()
    try:
        build_tools()
    except (debian.PackagesMissing, tools.ToolMissing) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"failed: {' '.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    return 0


def build_tools() -> None:
    debian.require(debian.CLUSTER_PACKAGES)
    tools.build_missing()


if __name__ == "__main__":
    sys.exit(main())
