"""The local clusters of other cache folders are found before anything long begins, whatever is left of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.cluster import owners, preflight, programs
from e2e.cluster.paths import CACHE, REPOSITORY
from e2e.cluster.processes import Processes


def test_the_processes_of_another_cluster_are_named_with_the_command_that_removes_it(tmp_path: Path) -> None:
    """The cluster of the own cache folder is no other one."""
    assert str(tmp_path) not in " ".join(owners.describe_others())
    processes = Processes(tmp_path, die_with_parent=True)
    for folder in (tmp_path, CACHE):
        sleep = ("python", "-c", "import time; time.sleep(60)", f"--kubeconfig={folder}/local/node.kubeconfig")
        processes.start("kubelet", sleep)
    try:
        (found,) = (line for line in owners.describe_others() if str(tmp_path) in line)
        assert f"(process {processes.recorded()[0].pid}, " in found
        assert f"`CONVEYOR_CACHE={tmp_path} make cluster-down` removes it" in found
        assert f"a local cluster of {CACHE} " not in " ".join(owners.describe_others())
        with pytest.raises(programs.ProgramMissing, match=f"a local cluster of {tmp_path} is on this machine"):
            preflight.check([], with_images=True)
    finally:
        processes.stop()


@pytest.mark.skipif(
    subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0,
    reason="needs a mount namespace of its own, so root",
)
@pytest.mark.parametrize("node", ["local", "local/second"])
def test_a_killed_cluster_is_known_by_its_mounts(tmp_path: Path, node: str) -> None:
    point = tmp_path / node / "containerd" / "netns"
    point.mkdir(parents=True)
    code = "import json; from e2e.cluster import owners; print(json.dumps(owners.describe_others()))"
    alone = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {point} && exec "$@"', "sh"]
    done = subprocess.run([*alone, sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    (found,) = (line for line in json.loads(done.stdout) if str(tmp_path) in line)
    assert f"(mount {point})" in found
