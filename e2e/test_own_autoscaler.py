"""A user's own autoscaler, and what `kubectl conveyor` reports about a cluster and about who sets the replicas."""

import asyncio
import json
from typing import Any

import pytest

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import quickstart

pytestmark = pytest.mark.xdist_group("chart")  # needs the metrics API all the time

BODY = {"model": "own", "max_tokens": 60, "min_tokens": 40, "temperature": 0.8}
IN_FLIGHT = {
    "type": "Object",
    "object": {
        "describedObject": {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "name": "own"},
        "metric": {"name": "inference_in_flight"},
        "target": {"type": "AverageValue", "averageValue": "3"},
    },
}
MINE = {
    "apiVersion": "autoscaling/v2",
    "kind": "HorizontalPodAutoscaler",
    "metadata": {"name": "mine"},
    "spec": {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "own-engine"},
        "minReplicas": 1,
        "maxReplicas": 2,
        "metrics": [IN_FLIGHT],
    },
}


def test_a_cluster_that_has_conveyor_lacks_nothing() -> None:
    output = kube.kubectl("conveyor", "check")
    assert "missing" not in output
    for sentence in ("Conveyor serves it", "the same as in this release", "nvidia.com/gpu"):
        assert sentence in output


@pytest.mark.nightly  # test_external.py of kubectl conveyor and test_handover.py of the operator show it without pods
async def test_an_autoscaler_of_ones_own_scales_and_hands_over_without_losing_a_pod(namespace: str) -> None:
    body = quickstart()
    body["metadata"]["name"] = "own"
    body["spec"]["autoscaling"] = {"provider": "External", "maxReplicas": 3}
    kube.apply(body, namespace)
    kube.wait_ready("own", namespace)
    kube.apply(MINE, namespace)
    async with running_load(service_url("own", namespace), BODY, concurrency=8) as load:
        await asyncio.to_thread(kube.wait_until, "two ready pods", lambda: ready(namespace) == 2, 240)
        assert (await asyncio.to_thread(explain, namespace))["reason"] == "OtherAutoscaler"
        kube.kubectl("delete", "hpa", "mine", "-n", namespace)
        body["spec"]["autoscaling"] = {"maxReplicas": 3}
        kube.apply(body, namespace)
        await asyncio.to_thread(kube.wait_until, "it is Conveyor's", lambda: reason(namespace) == "ScalingActive", 120)
        assert ready(namespace) >= 2
        explanation = await asyncio.to_thread(explain, namespace)
    assert explanation["bounds"] == {"minReplicas": 1, "maxReplicas": 3}
    assert {metric["name"] for metric in explanation["metrics"]} == {"inference_in_flight", "inference_queue_depth"}
    assert load.answers
    assert not load.failed, [a.error for a in load.failed]


def explain(namespace: str) -> dict[str, Any]:
    explanation: dict[str, Any] = json.loads(kube.kubectl("conveyor", "explain", "own", "-n", namespace, "-o", "json"))
    return explanation


def ready(namespace: str) -> int:
    deployment = kube.get("deployment", "own-engine", namespace) or {}
    return int((deployment.get("status") or {}).get("readyReplicas", 0))


def reason(namespace: str) -> str:
    return str(kube.condition(kube.get("infsvc", "own", namespace), "ScalingReady").get("reason"))
