"""The cluster crashes while pods run on it, and `down` still removes every trace. Runs at the end of `make e2e`."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e import kube
from e2e.cluster import local, sysctls
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.processes import Processes


@pytest.mark.takes_the_cluster_away
def test_after_a_crash_down_leaves_nothing() -> None:
    if kube.current_context() != local.CONTEXT:
        pytest.skip("kind's programs go with their containers")
    assert processes_of_the_cluster()
    recorded = Processes(local.FOLDER, die_with_parent=False).recorded()
    before = sysctls.noted(local.FOLDER)
    for process in recorded:
        if process.name in ("kubelet", "containerd"):
            os.kill(process.pid, signal.SIGKILL)
    command = [sys.executable, "-m", "e2e.cluster", "down"]
    down = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert down.returncode == 0, down.stderr
    assert local.left(recorded) == []
    assert processes_of_the_cluster() == []
    assert {name: Path("/proc/sys", name).read_text().strip() for name in before} == before


def processes_of_the_cluster() -> list[str]:
    """Return command lines that name the cluster's folder: of the recorded processes, and of the helpers of pods."""
    lines = subprocess.run(["ps", "-ewwo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in lines.splitlines() if f"{local.FOLDER}/" in line and not line.startswith("Z")]
