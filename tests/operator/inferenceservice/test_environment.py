"""Tests the environment variables of engine pods: names of the cluster beside a proxy, and no telemetry."""

from typing import Any

import pytest
from tests.operator.builders import build_one

PROXY = {"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}
LOCAL = "127.0.0.1,localhost,.svc,.cluster.local"


def build_variables(*env: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the variables of each container, by name."""
    pod = build_one("Deployment", pod={"env": list(env)})["spec"]["template"]["spec"]
    containers = [*pod["initContainers"], *pod["containers"]]
    return {each["name"]: {v["name"]: v.get("value", v) for v in each["env"]} for each in containers}


@pytest.mark.parametrize("exempt", ["NO_PROXY", "no_proxy"])
def test_names_of_the_cluster_are_exempt_from_a_proxy(exempt: str) -> None:
    for variables in build_variables(PROXY).values():
        assert variables["NO_PROXY"] == LOCAL
    for variables in build_variables(PROXY, {"name": exempt, "value": "10.0.0.0/8, .svc"}).values():
        assert variables[exempt] == "10.0.0.0/8,.svc,127.0.0.1,localhost,.cluster.local"
    assert "NO_PROXY" not in build_variables()["fetch"]


def test_exemptions_from_a_secret_stay_as_they_are() -> None:
    secret = {"name": "NO_PROXY", "valueFrom": {"secretKeyRef": {"name": "proxy", "key": "exempt"}}}
    for variables in build_variables(PROXY, secret).values():
        assert variables["NO_PROXY"] == secret


def test_no_telemetry_is_sent_unless_a_service_wants_it() -> None:
    variables = build_variables()
    assert variables["fetch"]["HF_HUB_DISABLE_TELEMETRY"] == variables["engine"]["HF_HUB_OFFLINE"] == "1"
    expected = {"name": "HF_HUB_DISABLE_TELEMETRY", "value": "0"}
    assert build_variables(expected)["fetch"]["HF_HUB_DISABLE_TELEMETRY"] == "0"
