"""Compares `kubectl conveyor explain` with a real HorizontalPodAutoscaler, operator and metrics server."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.metrics.aggregation import Aggregated, DemandServer
from tests.operator.stage import Space, wait_until

from e2e.cluster.tools import binary

Json = dict[str, Any]

# Targets 30 and 5.
BATCHING = {"maxBatchSize": 40}
NEVER_DOWN = {"scaleDown": {"stabilizationWindowSeconds": 600}}


class Explained:
    """A service `qwen` whose gateway reports what a test sets."""

    def __init__(self, space: Space, kubeconfig: Path, gateway: DemandServer) -> None:
        self._space, self._kubeconfig, self._gateway = space, kubeconfig, gateway

    def set(self, in_flight: int) -> None:
        self._gateway.services = {f"{self._space.namespace}/qwen": {"in_flight": in_flight, "queue_depth": 0}}

    def set_limit(self, rows: int, reason: str) -> None:
        """Let the gateway report one engine with one request, which can run this many requests at once."""
        engine = {"dispatched": 1, "waiting": 0, "carried": rows, "limit_reason": reason}
        demand = {"in_flight": 1, "queue_depth": 0, "batch_size": 40, "engines": {"10.0.0.1:8000": engine}}
        self._gateway.services = {f"{self._space.namespace}/qwen": demand}

    def explain(self, *flags: str) -> str:
        """Run `kubectl conveyor explain qwen`, as docs/autoscaling.md has it. kubectl finds the plugin."""
        command = [str(binary("kubectl")), "conveyor", "explain", "qwen", "-n", self._space.namespace, *flags]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = os.environ | {"KUBECONFIG": str(self._kubeconfig), "PATH": path}
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    def expect(self, reason: str, desired: int, looked: Callable[[Json], bool]) -> Json:
        """Check the predicted result, and after the controller's evaluation the explained result."""
        foretold = json.loads(self.explain("-o", "json"))

        def settled() -> Json | None:
            status = self._space.need("HorizontalPodAutoscaler", "qwen-engine").get("status") or {}
            replicas = self._space.need("Deployment", "qwen-engine")["status"].get("replicas")
            return status if looked(status) and replicas == status["desiredReplicas"] else None

        status = wait_until(f"{desired}: {reason}", settled)
        document = json.loads(self.explain("-o", "json"))
        assert foretold["desiredReplicas"] == document["desiredReplicas"] == status["desiredReplicas"] == desired, (
            document
        )
        assert document["reason"] == reason, document
        return dict(document)


def has_read(total: int) -> Callable[[Json], bool]:
    """Return whether the controller's last evaluation saw this many requests in flight."""

    def looked(status: Json) -> bool:
        found = (status.get("currentMetrics") or [{}])[0].get("object")
        average = found["current"].get("averageValue", "0") if found else "0"
        value = float(average[:-1]) / 1000 if average.endswith("m") else float(average)
        return bool(abs(value * status["currentReplicas"] - total) < 0.01 * status["currentReplicas"])

    return looked


def has_no_metrics(status: Json) -> bool:
    active = next(each for each in status["conditions"] if each["type"] == "ScalingActive")
    return bool(active["status"] == "False")


@pytest.mark.slow
def test_the_explanation_is_what_the_controller_decides(
    space: Space, aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    gateway = start_gateway({})
    aggregated.set_gateways(gateway)
    explained = Explained(space, aggregated.plane.kubeconfig, gateway)
    explained.set(0)
    autoscaling = {"minReplicas": 1, "maxReplicas": 4, "behavior": NEVER_DOWN}
    space.make_service(batching=BATCHING, autoscaling=autoscaling)
    wait_until("the first look", lambda: has_hpa_looked(space))
    explained.expect("AtMinimum", 1, has_read(0))
    explained.set(80)
    text = explained.expect("AtTarget", 3, has_read(80))
    assert text["metrics"][0] == {
        "name": "inference_in_flight",
        "value": 80,
        "target": 30,
        "ratio": pytest.approx(80 / 90),
        "tolerance": 0.1,
        "desiredReplicas": 3,
        "problem": None,
    }
    explained.set(95)
    explained.expect("WithinTolerance", 3, has_read(95))
    explained.set(300)
    explained.expect("AtMaximum", 4, has_read(300))
    explained.set(10)
    explained.expect("Stabilized", 4, has_read(10))
    gateway.status = 503
    explained.expect("NoMetrics", 4, has_no_metrics)
    assert "unknown" in explained.explain()
    space.edit("qwen", autoscaling=None)
    wait_until("no HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine") is None)
    fixed = json.loads(explained.explain("-o", "json"))
    assert (fixed["reason"], fixed["desiredReplicas"]) == ("FixedReplicas", 4)


@pytest.mark.slow
def test_a_step_that_the_policies_have_used_up_is_reported(
    space: Space, aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    gateway = start_gateway({})
    aggregated.set_gateways(gateway)
    explained = Explained(space, aggregated.plane.kubeconfig, gateway)
    explained.set(100)
    one_a_minute = {"scaleUp": {"policies": [{"type": "Pods", "value": 1, "periodSeconds": 600}]}}
    space.make_service(batching=BATCHING, autoscaling={"maxReplicas": 4, "behavior": one_a_minute})
    wait_until("the first step", lambda: count(space) == 2 and has_hpa_looked(space, 2))
    text = explained.expect("Limited", 2, has_read(100))
    assert "allows 1 pods within 600 s, and the last change was" in text["sentences"][0]


@pytest.mark.slow
def test_limits_that_objectives_move_are_reported_and_written_into_no_object(
    space: Space, aggregated: Aggregated, start_gateway: Callable[[dict[str, Json]], DemandServer]
) -> None:
    gateway = start_gateway({})
    aggregated.set_gateways(gateway)
    explained = Explained(space, aggregated.plane.kubeconfig, gateway)
    space.make_service(
        batching=BATCHING | {"objectives": {"interTokenLatency": "40ms"}}, autoscaling={"maxReplicas": 1}
    )
    explained.set_limit(40, "declared")
    wait_until("the first look", lambda: has_hpa_looked(space))
    wait_until("the limit", lambda: json.loads(explained.explain("-o", "json"))["objectives"]["engines"])
    before = space.need("InferenceService", "qwen")["metadata"]["resourceVersion"]
    explained.set_limit(12, "missed")
    sentence = "objectives: an engine runs 12 of 40 requests together\n1 engine   missed   the P95 was above the obj"
    wait_until("the sentence", lambda: sentence in explained.explain())
    assert space.need("InferenceService", "qwen")["metadata"]["resourceVersion"] == before


def has_hpa_looked(space: Space, replicas: int = 1) -> bool:
    """Return whether the HPA has evaluated with this number of replicas."""
    status = (space.get("HorizontalPodAutoscaler", "qwen-engine") or {}).get("status") or {}
    return bool(status.get("conditions")) and status["currentReplicas"] == replicas


def count(space: Space) -> int:
    found = space.get("Deployment", "qwen-engine") or {"spec": {}}
    return int(found["spec"].get("replicas", 0))
