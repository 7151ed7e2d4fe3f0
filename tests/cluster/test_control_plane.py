"""Tests the control plane that other tests use: it is fast, several can run at a time, and it leaves nothing."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary


@pytest.mark.slow
def test_its_processes_and_its_folder_are_gone_afterwards() -> None:
    with ControlPlane() as control_plane:
        processes = control_plane.processes.recorded()
        assert all(process.alive() for process in processes)
    assert not any(process.alive() for process in processes)
    assert not control_plane.folder.exists()


@pytest.mark.slow
def test_two_at_a_time_do_not_share_anything(control_plane: ControlPlane, namespace: str) -> None:
    with ControlPlane() as second:
        path = f"/api/v1/namespaces/{namespace}"
        found = [Api(each.kubeconfig).reachable(path) for each in (control_plane, second)]
    assert found == [True, False]


def test_controllers_work(control_plane: ControlPlane, namespace: str) -> None:
    kubectl = [str(binary("kubectl")), f"--kubeconfig={control_plane.kubeconfig}", f"--namespace={namespace}"]
    subprocess.run([*kubectl, "create", "deployment", "web", "--image=none"], check=True, capture_output=True)
    path = f"/api/v1/namespaces/{namespace}/pods"
    api = Api(control_plane.kubeconfig)
    wait_until("the Deployment's pod", lambda: bool(api.get(path)["items"]))


def test_an_owner_that_was_killed_leaves_nothing() -> None:
    code = (
        "import time; from e2e.cluster.control_plane import ControlPlane\n"
        "with ControlPlane() as c: print(c.folder, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True)
    assert owner.stdout is not None
    folder = Path(owner.stdout.readline().strip())
    assert _processes_in(folder)
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    wait_until("their end", lambda: not _processes_in(folder))
    ControlPlane().stop()  # the next one removes the remains of killed ones before it starts
    assert not folder.exists()


def _processes_in(folder: Path) -> list[str]:
    commands = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            commands.append((process / "cmdline").read_text())  # empty for a zombie
    return [command for command in commands if str(folder) in command]
