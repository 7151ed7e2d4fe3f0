"""Manages the control group of all containers of the local cluster, so that all of them can be found and killed.

Called by `local`, and by `second` for a group inside it. Works with version 1 (one tree for each controller) and
version 2 (one tree).
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

NAME = "conveyor"

_MOUNT = Path("/sys/fs/cgroup")


def shims(name: str) -> str:
    """Return the group of containerd's helpers in a node's group. There is one for each pod, and they outlive
    containerd."""
    return f"{name}/shims"


def create(name: str = NAME) -> None:
    if (_MOUNT / "cgroup.controllers").exists():
        controllers = (_MOUNT / "cgroup.controllers").read_text().split()
        (_MOUNT / "cgroup.subtree_control").write_text(" ".join(f"+{each}" for each in controllers))
    for tree in _trees():
        for group in (tree / name, tree / shims(name)):
            group.mkdir(exist_ok=True)
            for inherited in ("cpuset.cpus", "cpuset.mems"):  # a new group of version 1 has none, so nothing could run
                if tree.name == "cpuset":
                    (group / inherited).write_text((group.parent / inherited).read_text())


def delete(name: str = NAME) -> None:
    """Kill all processes in the group and remove it."""
    deadline = time.monotonic() + 10
    while pids := set(_pids(name)):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(pids)} of the control group {name} do not end")
        time.sleep(0.05)
    for group in _groups(name):
        group.rmdir()


def left() -> list[str]:
    """Return the names of the groups that `delete` would remove."""
    return [f"control group {tree / NAME}" for tree in _trees() if (tree / NAME).exists()]


def _trees() -> list[Path]:
    if (_MOUNT / "cgroup.procs").exists():
        return [_MOUNT]
    return [tree for tree in _MOUNT.iterdir() if not tree.is_symlink() and (tree / "cgroup.procs").exists()]


def _groups(name: str) -> Iterator[Path]:
    """Yield the group and all groups below it in every tree, children first."""
    for tree in _trees():
        for folder, _, _ in os.walk(tree / name, topdown=False):
            yield Path(folder)


def _pids(name: str) -> Iterator[int]:
    for group in _groups(name):
        try:
            yield from map(int, (group / "cgroup.procs").read_text().split())
        except FileNotFoundError:
            continue
