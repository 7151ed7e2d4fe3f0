"""Tests the pods of engines that serve TLS."""

import os
import re
import subprocess
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.kubelet import Kubelet, ready
from tests.operator.stage import Json, Space, Stage, make_service

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.settings import Settings
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import binary


def build_children(secret: str, **spec: Any) -> list[Json]:
    body = make_service(**spec)
    body["metadata"] |= {"namespace": "team", "uid": "1", "generation": 1}
    service = InferenceService.parse(body)
    settings = Settings(engine_tls_secret=secret)
    desired = build_desired(service, settings, Observed(), PodStarts(service.status, []), datetime.now(UTC))
    return desired.children


def build_pod(secret: str, **spec: Any) -> Json:
    (deployment,) = [child for child in build_children(secret, **spec) if child["kind"] == "Deployment"]
    pod: Json = deployment["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("spec", [{}, {"runtime": "VLLM", "engine": {"image": "vllm/vllm-openai:v1"}}])
def test_engines_get_the_secret_and_probes_by_https(spec: Json) -> None:
    plain, pod = build_pod("", **spec), build_pod("engine-tls", **spec)
    (engine,) = pod["containers"]
    added = [volume for volume in pod["volumes"] if volume not in plain["volumes"]]
    assert added == [{"name": "conveyor-tls", "secret": {"secretName": "engine-tls"}}]
    assert {"name": "conveyor-tls", "mountPath": "/etc/conveyor-tls", "readOnly": True} in engine["volumeMounts"]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    assert {engine[probe]["httpGet"]["scheme"] for probe in probes} == {"HTTPS"}
    assert {engine[probe]["httpGet"]["port"] for probe in probes} == {port["name"] for port in engine["ports"]}
    assert pod["initContainers"] == plain["initContainers"]  # they serve nothing
    if spec:
        assert "--ssl-certfile=/etc/conveyor-tls/tls.crt" in engine["command"]
        assert "https://localhost:" in engine["lifecycle"]["preStop"]["exec"]["command"][2]
    else:
        assert {"name": "CONVEYOR_ENGINE_TLS_FOLDER", "value": "/etc/conveyor-tls"} in engine["env"]


def test_the_services_ports_say_that_both_serve_tls() -> None:
    services = [child for child in build_children("engine-tls") if child["kind"] == "Service"]
    (engine,), (public,) = (service["spec"]["ports"] for service in services)
    assert engine["appProtocol"] == "https"
    assert (public["name"], public["port"]) == ("https", 443)


def test_plain_engines_do_not_count_while_new_ones_wait_for_the_secret(stage: Stage) -> None:
    """The gateways send no more plain requests."""
    space = stage.space

    def without_secret(pod: Json) -> Json | None:
        mounted = any(volume["name"] == "conveyor-tls" for volume in pod["spec"]["volumes"])
        return None if mounted else ready(pod)

    with Kubelet(space, ready) as kubelet:
        with stage.operator():
            space.make_service()
            space.wait_condition("qwen", "Ready", "True", "Ready")
        kubelet.decide = without_secret
        with stage.operator(engine_tls_secret="engine-tls"):
            space.wait_condition("qwen", "EndpointReady", "False", "NoReadyEndpoints")
            assert space.condition("qwen", "Ready")["status"] == "False"
            kubelet.decide = ready
            space.wait_condition("qwen", "Ready", "True", "Ready")
        with stage.operator():
            space.wait_condition("qwen", "Progressing", "True", "RollingOut")
            space.wait_condition("qwen", "Ready", "True", "Ready")


def test_namespaces_without_the_secret_are_found(space: Space, control_plane: ControlPlane) -> None:
    page = (REPOSITORY / "docs" / "tls.md").read_text()
    (command,) = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    space.make_service("first")
    space.make_service("second")

    def find() -> list[str]:
        path = f"{binary('kubectl').parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "KUBECONFIG": str(control_plane.kubeconfig)}
        shell = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=False)
        return shell.stdout.split()

    assert find().count(space.namespace) == 1
    space.api.create(f"/api/v1/namespaces/{space.namespace}/secrets", {"metadata": {"name": "conveyor-engine-tls"}})
    assert space.namespace not in find()
