"""The commands of the README (docs/index.md is generated from it), the installation and the quickstart, verbatim.

This cluster has no GPU and does not use the internet's hub. So the quickstart's manifest is changed between two of its
commands: a local hub serves the demo model under the manifest's name, and `engine.device: Auto` runs it on the CPU.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from e2e import kube
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import search_path
from e2e.deploy import deploy
from e2e.hub_of_demo import from_hub, running_hub


def commands(page: str, begin: str = "") -> list[str]:
    """Return the `sh` blocks of a page, in order, from the text `begin` on."""
    _, heading, rest = (REPOSITORY / page).read_text().partition(begin or "\n")
    assert heading
    return re.findall(r"```sh\n(.*?)```", rest, re.DOTALL)


def shell(script: str, timeout_seconds: float = 500) -> str:
    """Run a block as a person would paste it, with kubectl and helm on the PATH; fails with what it printed."""
    environment = {**os.environ, "PATH": search_path()}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=timeout_seconds,
    )  # fmt: skip
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.xdist_group("chart")
@pytest.mark.usefixtures("default")
def test_the_readme_s_demo_does_what_it_says_and_its_curl_answers() -> None:
    demo, curl = commands("README.md", "## See it on Kubernetes")[:2]
    out = shell(demo.splitlines()[0])
    assert "0 failed" in out
    assert "demo" in shell('unset KUBECONFIG; eval "$(make -s demo-env)"; kubectl get infsvc')
    assert '"object":"chat.completion"' in shell(curl).replace(" ", "")
    figures = shell(commands("docs/autoscaling.md")[0])  # the page shows what the service's autoscaler sees
    assert "InferenceService" in figures
    assert "demo-engine" in figures
    assert "desiredReplicas" in figures
    try:
        went_on = shell(
            "\n".join(re.findall(r"^(?:export KUBECONFIG=|[\w./-]*kubectl |curl |[\w./-]*helm ).*$", out, re.MULTILINE))
        )
        kept = kube.get("deployment", "conveyor-gateway", kube.SYSTEM_NAMESPACE)
    finally:
        deploy()  # other stories expect two gateways
    assert kept
    assert kept["spec"]["replicas"] == 3
    assert ":dev-" in kept["spec"]["template"]["spec"]["containers"][0]["image"], (
        "the upgrade has taken the demo's images"
    )
    assert "inferenceservice.conveyor.dev/demo" in went_on
    assert "horizontalpodautoscaler.autoscaling/demo-engine" in went_on
    assert '"object":"chat.completion"' in went_on.replace(" ", "")


@pytest.mark.alone
@pytest.mark.usefixtures("default")
def test_the_quickstart_s_commands_do_what_they_say(tmp_path: Path) -> None:
    try:
        with running_hub(tmp_path) as hub:
            for block in [*commands("docs/install.md", "## Install the chart\n"), *commands("docs/quickstart.md")]:
                out = shell(block)
                if "kubectl apply" in block:
                    kube.apply(from_hub(hub, yaml.safe_load((kube.MANIFESTS / "qwen.yaml").read_text())), "default")
                if "condition=Ready" in block:
                    assert " blocks=" in shell("kubectl logs deploy/qwen-engine | grep kv_cache_allocated")  # sizing.md
                if "curl" in block:
                    assert '"object":"chat.completion"' in out.replace(" ", "")
    finally:
        deploy()  # the stories after this one run the images that were built, by their digests
