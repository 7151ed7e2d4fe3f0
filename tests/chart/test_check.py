"""Tests `helm test`: the pod that checks an installation, and its results."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chart.installation import (
    Json,
    Release,
    find,
    make_reachable_chart,
    render,
    running,
    running_metrics,
    running_operator,
    take_over,
    write_account_kubeconfig,
)
from tests.chart.test_templates import create_pod

from conveyor_api.names import CRD_NAME, SYSTEM_NAMESPACE
from conveyor_operator.check import build_parser
from e2e.cluster.api import Api


def test_the_pod_is_a_test_of_helm_with_flags_that_the_program_has(rendered: list[Json]) -> None:
    pod = find(rendered, "Pod", "conveyor-test")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    assert container["command"] == ["python", "-m", "conveyor_operator", "check"]
    given = build_parser().parse_args(container["args"])
    service = find(rendered, "Service", "conveyor-gateway")["metadata"]
    assert given.gateway_url == f"http://{service['name']}.{service['namespace']}.svc.cluster.local"
    without = find(render("metrics.enabled=false"), "Pod", "conveyor-test")["spec"]["containers"][0]["args"]
    assert build_parser().parse_args(without).metrics_api == "false"


@pytest.mark.slow
def test_the_pod_is_restricted_and_its_account_has_no_rights(api: Api, rendered: list[Json]) -> None:
    pod = find(rendered, "Pod", "conveyor-test")
    create_pod(api, "conveyor-test", pod["spec"])
    assert pod["spec"]["serviceAccountName"] == find(rendered, "ServiceAccount", "conveyor-test")["metadata"]["name"]
    subjects = {subject["name"] for item in rendered for subject in item.get("subjects", ())}
    assert "conveyor-test" not in subjects
    operator = find(rendered, "Deployment", "conveyor-operator")["spec"]["selector"]["matchLabels"]
    assert not operator.items() <= pod["metadata"]["labels"].items()


class Asked:
    """Runs the check as an account without rights, with a gateway on this machine."""

    def __init__(self, release: Release, folder: Path) -> None:
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            self.port: int = holder.getsockname()[1]
        account = {"metadata": {"name": "conveyor-test"}}
        release.api.create(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/serviceaccounts", account)
        self._kubeconfig = write_account_kubeconfig(release.plane, "conveyor-test", folder / "test.kubeconfig")

    def answer(self, seconds: float = 60, *flags: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "conveyor_operator", "check", f"--gateway-url=http://127.0.0.1:{self.port}"]
        command += [f"--kubeconfig={self._kubeconfig}", f"--timeout-seconds={seconds}", *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_it_says_what_answers_and_what_does_not(release: Release, tmp_path: Path) -> None:
    release_calls = Asked(release, tmp_path)
    code, text = release_calls.answer(0)
    assert code == 1
    assert len(re.findall(r"^FAILED: ", text, re.MULTILINE)) == 4
    assert f"the CRD {CRD_NAME} is not installed" in text
    assert "shows its owner" in text
    assert f"the gateway at http://127.0.0.1:{release_calls.port}: ClientConnectorError" in text
    reachable = make_reachable_chart(tmp_path)
    release.upgrade(chart=reachable.chart)
    objects, ports = (
        render(),
        ("--host=127.0.0.1", f"--port={release_calls.port}", "--admin-port=0", "--drain-delay-seconds=0"),
    )
    with (
        running_operator(release.plane, objects, tmp_path),
        running(release.plane, "gateway", objects, tmp_path, *ports),
    ):
        with running_metrics(release.plane, objects, tmp_path, reachable.port):
            assert release_calls.answer() == (
                0,
                f"{CRD_NAME} is served, http://127.0.0.1:{release_calls.port} answers, "
                "custom.metrics.k8s.io has the metrics of InferenceServices\n",
            )
        code, text = release_calls.answer(0)
        assert code == 1
        assert "FAILED: the API server, or an aggregated API behind it, responds 503" in text
        assert release_calls.answer(0, "--metrics-api=false")[0] == 0
        take_over(release, "v1beta2")
        code, text = release_calls.answer(0)
        assert code == 1
    release.api.delete("/apis/apiregistration.k8s.io/v1/apiservices/v1beta2.custom.metrics.k8s.io")
