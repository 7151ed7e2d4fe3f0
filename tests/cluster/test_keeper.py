"""Tests the parent of the local cluster's processes, if the first process reaps no children, as in many containers."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from e2e.cluster.api import wait_until
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.processes import Processes

# A cluster of two processes. One of them leaves an orphan, as containerd leaves its shims.
CLUSTER = """
import sys
from pathlib import Path
from e2e.cluster import keeper
from e2e.cluster.processes import Processes

FOLDER = Path({folder!r})
processes = Processes(FOLDER, die_with_parent=False)

def start():
    processes.record(keeper.NAME)
    processes.start("sleeper", ["python", "-c", "import time; time.sleep(600)"])
    shim = "import os, time; os.fork() or time.sleep(600)"
    processes.start("containerd", ["python", "-c", shim])
    {then}

def stop():
    others = [process.name for process in processes.recorded() if process.name != keeper.NAME]
    processes.stop(others, grace_seconds=0)
    import os, signal
    for child in Path(f"/proc/self/task/{{os.getpid()}}/children").read_text().split():
        os.kill(int(child), signal.SIGKILL)

if __name__ == "__main__":
    keeper.keep(start, stop, FOLDER / "log", int(sys.argv[1]))
"""
LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from e2e.cluster import keeper; print(keeper.launch('kept'))"


def launch(folder: Path, then: str = "pass") -> str:
    (folder / "kept.py").write_text(CLUSTER.format(folder=str(folder), then=then))
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{REPOSITORY}"}
    command = [sys.executable, "-c", LAUNCH, str(folder)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=REPOSITORY).stdout


def zombies() -> list[str]:
    """Return the programs of this process's children that are zombies."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    states = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] for child in children]
    return [child for child, state in zip(children, states, strict=True) if state == "Z"]


def test_nothing_but_the_keeper_is_left_to_a_parent_that_waits_for_nobody(tmp_path: Path) -> None:
    before = zombies()
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans become children of this process
    try:
        assert launch(tmp_path) == "True\n"
        processes = Processes(tmp_path, die_with_parent=False)
        keeper, *kept = processes.recorded()
        assert all(process.alive() for process in (keeper, *kept[:1]))
        processes.stop(["keeper"], grace_seconds=30)
        assert not any(process.alive() for process in (keeper, *kept))
        left = [child for child in zombies() if child not in before]
        assert left == [str(keeper.pid)]
        os.waitpid(keeper.pid, 0)
    finally:
        ctypes.CDLL(None).prctl(36, 0)


def test_what_ends_while_the_cluster_is_up_is_waited_for(tmp_path: Path) -> None:
    ctypes.CDLL(None).prctl(36, 1)
    try:
        launch(tmp_path)
        processes = Processes(tmp_path, die_with_parent=False)
        keeper, sleeper, _ = processes.recorded()
        processes.stop(["sleeper"])
        wait_until("its end", lambda: not Path(f"/proc/{sleeper.pid}").exists())
        processes.stop(["keeper"], grace_seconds=30)
        os.waitpid(keeper.pid, 0)
    finally:
        ctypes.CDLL(None).prctl(36, 0)


def test_a_start_that_fails_stops_what_it_has_started(tmp_path: Path) -> None:
    assert launch(tmp_path, then="raise RuntimeError('no node')") == "False\n"
    assert Processes(tmp_path, die_with_parent=False).recorded()[1:] == []
