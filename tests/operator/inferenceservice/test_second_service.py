"""Runs the page about a second service with simulated pods: all commands except those that connect to a pod.

`e2e/test_second_service.py` runs all of it, with pods that run.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from tests.operator import kubelet
from tests.operator.kubelet import Json, Kubelet
from tests.operator.stage import Space, Stage, wait_until

from conveyor_api.names import INFERENCE_SERVICE_LABEL
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary

PAGE = REPOSITORY / "docs" / "second-service.md"
NAMESPACE = "team-a"


def play(pod: Json) -> Json:
    """Let engines run, and Jobs end soon."""
    if INFERENCE_SERVICE_LABEL in pod["metadata"].get("labels", {}):
        return kubelet.ready(pod)
    return {"phase": "Succeeded"}


@pytest.mark.slow
def test_the_page_s_commands_are_taken_by_a_real_cluster(stage: Stage, kubeconfig: Path) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    space = Space(stage.space.api, NAMESPACE)
    path = f"{Path(binary('kubectl')).parent}:{os.environ['PATH']}"
    ran = []
    with stage.operator(watch_namespaces=(NAMESPACE,)), Kubelet(space, play):
        for block in blocks:
            if "port-forward" in block or "kubectl -n team-a cp" in block:
                continue
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block],
                env={**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig)},
                capture_output=True, text=True, timeout=120,
            )  # fmt: skip
            assert done.returncode == 0, f"{block}\n{done.stdout}{done.stderr}"
            ran.append(done.stdout)
            if "create namespace" in block:
                wait_until("its default account", lambda: space.get("ServiceAccount", "default"))
    assert len(ran) == len(blocks) - 3
    assert "job.batch/fill-models condition met" in "".join(ran)
    assert "inferenceservice.conveyor.dev/local condition met" in "".join(ran)
