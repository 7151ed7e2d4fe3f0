"""Tests the pods of engines that serve TLS."""

from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.stage import Json, make_service

from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.settings import Settings


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
