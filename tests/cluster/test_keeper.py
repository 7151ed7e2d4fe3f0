"""Tests the parent of the local cluster's processes, if the first process reaps no children, as in many containers."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_start_that_fails_stops_what_it_has_started(tmp_path: Path) -> None:
    assert launch(tmp_path, then="raise RuntimeError('no node')") == "False\n"
    assert Processes(tmp_path, die_with_parent=False).recorded()[1:] == []
