"""Runs `helm upgrade --wait --rollback-on-failure` on a chart that has an InferenceService.

Helm judges the service by kstatus. The operator and the API server are real, and the kubelet is played.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.chart.installation import HelmFailed, helm
from tests.operator.kubelet import Kubelet, image_pull_failed, ready
from tests.operator.stage import Stage, make_service

from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]
Upgrade = Callable[..., str]
BAD = "registry.example.com/bad:2"


@pytest.fixture
def upgrade(stage: Stage, control_plane: ControlPlane, tmp_path: Path) -> Upgrade:
    """Return a function that installs or upgrades the chart with an engine image and waits."""
    chart = tmp_path / "chart"
    (chart / "templates").mkdir(parents=True)
    (chart / "Chart.yaml").write_text('{"apiVersion": "v2", "name": "team", "version": "0.0.1"}')
    service = make_service(
        "qwen", engine={"image": "{{ .Values.image }}"}, rollout={"maxSurge": 1, "maxUnavailable": 0}
    )
    (chart / "templates/service.yaml").write_text(json.dumps(service))

    def run(image: str, *options: str) -> str:
        flags = ("--install", "--namespace", stage.space.namespace, "--set", f"image={image}", "--wait", *options)
        return helm("upgrade", "team", chart, *flags, kubeconfig=control_plane.kubeconfig)

    return run


def play(pod: Json) -> Json:
    return image_pull_failed(pod) if pod["spec"]["containers"][0]["image"] == BAD else ready(pod)


def test_helm_waits_for_a_first_engine_and_rolls_a_failed_upgrade_back(
    stage: Stage, upgrade: Upgrade, control_plane: ControlPlane
) -> None:
    with stage.operator(), Kubelet(stage.space, play):
        upgrade("example/good:1")
        assert stage.space.condition("qwen", "Ready")["status"] == "True"
        with pytest.raises(HelmFailed, match="rolled back"):
            upgrade(BAD, "--rollback-on-failure", "--timeout", "60s")
    service = stage.space.need("InferenceService", "qwen")
    assert service["spec"]["engine"]["image"] == "example/good:1"
    history = helm("history", "team", "-n", stage.space.namespace, "-o", "json", kubeconfig=control_plane.kubeconfig)
    assert [revision["status"] for revision in json.loads(history)] == ["superseded", "failed", "deployed"]


def test_helm_waits_for_an_operator_that_has_not_seen_a_service(upgrade: Upgrade) -> None:
    with pytest.raises(HelmFailed, match="InProgress"):
        upgrade("example/good:1", "--timeout", "5s")
