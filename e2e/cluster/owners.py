"""Finds the local clusters of other cache folders on this machine, up or killed: two would share addresses and names.

Called by `preflight`, before anything long begins. Another user's cluster has another cache folder, whose path is in
the commands of its processes and in its mounts. Standard library only, and needs no program.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from e2e.cluster.paths import CACHE

_PROC = Path("/proc")
# Arguments of the cluster's programs, and mount points of its pods.
_FILE = re.compile(
    r"(/[^\0=:,]*)/local/(?:second/)?(?:containerd\.(?:toml|sock)|[\w.-]*kubeconfig|Kube\w+Configuration\.json|Corefile)(?=[\0:,])"
)
_MOUNT = re.compile(r"(/.*)/local/(?:second/)?(?:containerd|kubelet)/.+")


def describe_others() -> list[str]:
    """Return a sentence for each other cluster, with the command that removes it."""
    found: dict[str, list[str]] = {}
    for folder, trace in (*_processes(), *_mounts()):
        if folder != str(CACHE):
            found.setdefault(folder, []).append(trace)
    return [
        f"a local cluster of {folder} is on this machine ({_list(traces)}); "
        f"`CONVEYOR_CACHE={folder} make cluster-down` removes it"
        for folder, traces in sorted(found.items())
    ]


def _list(traces: list[str]) -> str:
    return traces[0] if len(traces) == 1 else f"{traces[0]} and {len(traces) - 1} more"


def _processes() -> Iterator[tuple[str, str]]:
    """Yield the cache folder and a description of each process of a local cluster."""
    for entry in sorted(filter(str.isdecimal, os.listdir(_PROC)), key=int):
        try:
            command = (_PROC / entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended
            continue
        program, _, arguments = command.partition("\0")
        if folder := _FILE.search(arguments):
            yield folder[1], f"process {entry}, {Path(program).name}"


def _mounts() -> Iterator[tuple[str, str]]:
    for line in (_PROC / "self" / "mountinfo").read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")
        if folder := _MOUNT.fullmatch(point):
            yield folder[1], f"mount {point}"
