"""Tests the process: its start, its health, its end, and the HorizontalPodAutoscaler that uses it."""

import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.metrics.aggregation import Aggregated, DemandServer, running_server, write_serving_certificate
from tests.operator.builders import make_resource

from conveyor_operator.inferenceservice.desired import build_owner
from conveyor_operator.inferenceservice.manifests.autoscaling import build_autoscaler
from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

Json = dict[str, Any]


def read_health(port: int, path: str) -> tuple[int, str]:
    """Return status and text of the page; (0, "") while nothing listens."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return 0, ""


def test_the_start_waits_for_the_operator_to_fill_the_secret(metrics_plane: ControlPlane, tmp_path: Path) -> None:
    (tmp_path / "tls.crt").touch()
    with running_server(metrics_plane, tmp_path) as (_, _, admin_port):
        expected = (503, "waiting for the serving certificate\n")
        wait_until("the wait", lambda: read_health(admin_port, "/readyz") == expected)
        assert read_health(admin_port, "/livez") == (200, "ok\n")
        write_serving_certificate(Authority(tmp_path, "authority"), tmp_path)
        wait_until("ready", lambda: read_health(admin_port, "/readyz") == (200, "ok\n"))


def test_metrics_of_the_process_are_served_for_prometheus(aggregated: Aggregated) -> None:
    code, text = read_health(aggregated.admin_port, "/metrics")
    assert code == 200
    assert 'conveyor_metrics_requests_total{code="200"}' in text
    assert "conveyor_metrics_serving_certificate_expiry_timestamp_seconds 1." in text


def test_a_new_serving_certificate_keeps_the_api_available(aggregated: Aggregated) -> None:
    """The operator's rotation writes a new certificate of an authority that the APIService already trusts."""
    before = (aggregated.folder / "tls.crt").read_bytes()
    write_serving_certificate(aggregated.authority, aggregated.folder)
    assert (aggregated.folder / "tls.crt").read_bytes() != before
    for _ in range(30):
        aggregated.api.get("/apis/custom.metrics.k8s.io/v1beta2")


def test_help_names_every_setting_and_its_variable() -> None:
    command = [sys.executable, "-m", "conveyor_metrics", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--certificate-folder" in text
    assert "$CONVEYOR_METRICS_GATEWAY_TIMEOUT_SECONDS" in text


def test_a_kubernetes_that_cannot_be_found_ends_the_process_with_a_sentence() -> None:
    command = [sys.executable, "-m", "conveyor_metrics", "--admin-port=0", "--kubeconfig=/nowhere"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "cannot connect to Kubernetes" in done.stderr
    assert "Traceback" not in done.stderr


def build_hpa(name: str, metrics: list[Json]) -> Json:
    return {
        "metadata": {"name": name},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicas": 1,
            "maxReplicas": 9,
            "metrics": metrics,
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }


def build_metric(name: str) -> Json:
    return {
        "type": "Object",
        "object": {
            "describedObject": {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "name": name},
            "metric": {"name": "inference_in_flight"},
            "target": {"type": "AverageValue", "averageValue": "10"},
        },
    }


def build_deployment(name: str) -> Json:
    labels = {"app": name}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "none"}]}}
    return {
        "metadata": {"name": name},
        "spec": {"replicas": 1, "selector": {"matchLabels": labels}, "template": template},
    }


@pytest.mark.slow
def test_the_hpa_of_a_real_controller_follows_the_value_and_holds_when_it_is_not_known(
    aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    api: Api = aggregated.api
    install_definitions(api)
    gateway = start_gateway({"default/scaled": {"in_flight": 35, "queue_depth": 0}})
    aggregated.set_gateways(gateway)
    api.create("/apis/apps/v1/namespaces/default/deployments", build_deployment("scaled"))
    hpas = "/apis/autoscaling/v2/namespaces/default/horizontalpodautoscalers"
    api.create(hpas, build_hpa("scaled", [build_metric("scaled")]))

    def desired() -> int:
        return int(api.get(f"{hpas}/scaled")["status"].get("desiredReplicas", -1))

    def replicas() -> int:
        return int(api.get("/apis/apps/v1/namespaces/default/deployments/scaled")["spec"]["replicas"])

    def active() -> Json:
        conditions = api.get(f"{hpas}/scaled")["status"].get("conditions", [])
        return next((c for c in conditions if c["type"] == "ScalingActive"), {"status": "Unknown"})

    wait_until("35 / 10 -> 4 replicas", lambda: (desired(), replicas()) == (4, 4))
    gateway.status = 503
    wait_until("the HPA's notice", lambda: active()["status"] == "False")
    assert "the sum over the gateways is not known" in active()["message"]
    gateway.services = {"default/scaled": {"in_flight": 1, "queue_depth": 0}}
    assert replicas() == 4  # what it does not know, it does not act on
    gateway.status = 200
    wait_until("1 / 10 -> 1 replica", lambda: replicas() == 1)
    api.delete(f"{hpas}/scaled")
    api.delete("/apis/apps/v1/namespaces/default/deployments/scaled")


@pytest.mark.slow
def test_while_a_gateway_cannot_be_read_the_hpa_goes_up_and_never_down(
    aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    """The HPA has the operator's metrics, with targets of 30 requests in flight and 5 that wait."""
    api: Api = aggregated.api
    install_definitions(api)
    name = "partly"
    one, other = (start_gateway({f"default/{name}": {"in_flight": 60, "queue_depth": 0}}) for _ in range(2))
    aggregated.set_gateways(one, other)
    spec = make_resource(batching={"maxBatchSize": 40}, autoscaling={"maxReplicas": 9}).spec
    body = build_autoscaler(build_owner("default", name, ""), spec, 420)
    assert body is not None
    deployments, hpas = (
        f"/apis/{kind}/namespaces/default/{plural}"
        for kind, plural in (("apps/v1", "deployments"), ("autoscaling/v2", "horizontalpodautoscalers"))
    )
    api.create(deployments, build_deployment(name))
    api.create(hpas, build_hpa(name, body["spec"]["metrics"]))

    def replicas() -> int:
        return int(api.get(f"{deployments}/{name}")["spec"]["replicas"])

    def looked(status: str) -> bool:
        """Return whether ScalingActive has this status.

        The HPA evaluates every second and then writes its conditions.
        """
        conditions = api.get(f"{hpas}/{name}")["status"].get("conditions", [])
        return any((each["type"], each["status"]) == ("ScalingActive", status) for each in conditions)

    wait_until("120 / 30 -> 4 replicas", lambda: replicas() == 4)
    other.status = 503
    wait_until("the HPA's notice", lambda: looked("False"))
    assert replicas() == 4
    one.services = {f"default/{name}": {"in_flight": 60, "queue_depth": 28}}
    wait_until("28 / 5 -> 6 replicas", lambda: replicas() == 6)
    assert looked("True")
    one.services = {f"default/{name}": {"in_flight": 1, "queue_depth": 0}}
    wait_until("the HPA's notice", lambda: looked("False"))
    assert replicas() == 6
    other.services = {f"default/{name}": {"in_flight": 28, "queue_depth": 0}}
    other.status = 200
    wait_until("29 / 30 -> 1 replica", lambda: replicas() == 1)
    api.delete(f"{hpas}/{name}")
    api.delete(f"{deployments}/{name}")
