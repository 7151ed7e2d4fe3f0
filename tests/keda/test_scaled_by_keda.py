"""Tests `provider: KEDA` with KEDA itself.

Its operator creates the HPA, and its trigger reads the real metrics server.
"""

from collections.abc import Callable
from typing import Any

import pytest
from tests.cli.kubectl.test_explained_service import Explained, count
from tests.metrics.aggregation import Aggregated, DemandServer
from tests.operator.stage import Space, wait_until

Json = dict[str, Any]
StartGateway = Callable[[dict[str, Json]], DemandServer]

AT_ONCE = {
    "scaleUp": {"policies": [{"type": "Pods", "value": 9, "periodSeconds": 1}]},
    "scaleDown": {"stabilizationWindowSeconds": 0},
}
AUTOSCALING = {"provider": "KEDA", "maxReplicas": 6, "behavior": AT_ONCE}
BATCHING = {"maxBatchSize": 32}  # targets 24 and 4

pytestmark = [pytest.mark.brings_keda, pytest.mark.usefixtures("with_keda")]


def set_demand(gateway: DemandServer, space: Space, in_flight: int, queue_depth: int = 0) -> None:
    gateway.services = {f"{space.namespace}/qwen": {"in_flight": in_flight, "queue_depth": queue_depth}}


def owners(space: Space) -> list[str]:
    return [hpa["metadata"]["ownerReferences"][0]["kind"] for hpa in space.list("HorizontalPodAutoscaler")]


def wait_count(space: Space, expected: int) -> None:
    def show() -> Any:
        return count(space), space.condition("qwen", "ScalingReady"), space.list("HorizontalPodAutoscaler")

    wait_until(f"{expected} replicas", lambda: count(space) == expected, 90, show)


def test_keda_follows_the_queue_and_holds_where_the_sum_is_not_known(
    space: Space, aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    one, other = start_gateway({}), start_gateway({})
    aggregated.set_gateways(one, other)
    explained = Explained(space, aggregated.plane.kubeconfig, one)
    set_demand(one, space, 40)
    set_demand(other, space, 30)
    space.make_service(batching=BATCHING, autoscaling=AUTOSCALING)
    wait_count(space, 3)  # 70 / 24
    space.wait_condition("qwen", "ScalingReady", "True", "ScalingActive")
    assert owners(space) == ["ScaledObject"]
    status = wait_until("the arithmetic", lambda: find_condition(space, "inference_in_flight 70 / 24 -> 3"))
    assert [metric["target"] for metric in status["metrics"]] == ["24", "4"]
    assert "inference_in_flight     70      24" in explained.explain()
    other.status = 503
    space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
    assert count(space) == 3
    set_demand(one, space, 40, 20)
    wait_count(space, 5)  # 20 / 4, of the gateway that answers
    set_demand(one, space, 1)
    space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
    assert count(space) == 5
    set_demand(other, space, 25)
    other.status = 200
    wait_count(space, 2)  # 26 / 24


def find_condition(space: Space, words: str) -> Json | None:
    status = (space.need("InferenceService", "qwen").get("status") or {}).get("autoscaling") or {}
    return status if words in status.get("message", "") else None


def test_the_replicas_stay_while_the_provider_changes(
    space: Space, aggregated: Aggregated, start_gateway: StartGateway
) -> None:
    """KEDA's webhook, which refuses a ScaledObject if there is another HPA, is running."""
    gateway = start_gateway({})
    aggregated.set_gateways(gateway)
    set_demand(gateway, space, 90)
    space.make_service(batching=BATCHING, autoscaling=AUTOSCALING | {"provider": "Native"})
    wait_count(space, 4)
    gateway.status = 503  # so that nobody scales while it changes hands
    for provider, owner in (("KEDA", "ScaledObject"), ("Native", "InferenceService"), ("KEDA", "ScaledObject")):
        space.edit("qwen", autoscaling={"provider": provider})
        wait_until(f"the HPA of {provider}", lambda owner=owner: owners(space) == [owner])
        assert count(space) == 4
    space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
    gateway.status = 200
    set_demand(gateway, space, 110)
    wait_count(space, 5)
    space.edit("qwen", autoscaling={"provider": "External", "behavior": None})
    space.wait_condition("qwen", "ScalingReady", "True", "ExternalAutoscaler")
    wait_until("the end of the ScaledObject", lambda: not space.list("ScaledObject"))
    assert (owners(space), count(space)) == ([], 5)
    space.edit("qwen", autoscaling={"provider": "KEDA"})
    wait_until("KEDA's HPA", lambda: owners(space) == ["ScaledObject"])
    space.edit("qwen", autoscaling=None)
    space.wait_condition("qwen", "ScalingReady", "True", "FixedReplicas")
    wait_until("the end of the ScaledObject", lambda: not space.list("ScaledObject"))
    assert (owners(space), count(space)) == ([], 5)


def test_a_service_that_is_deleted_takes_its_scaled_object_along(space: Space) -> None:
    space.make_service(batching=BATCHING, autoscaling=AUTOSCALING)
    wait_until("KEDA's HPA", lambda: owners(space) == ["ScaledObject"])
    space.patch("ScaledObject", "qwen-engine", {"metadata": {"annotations": {"autoscaling.keda.sh/paused": "true"}}})
    wait_until("paused", lambda: "is paused" in space.condition("qwen", "ScalingReady")["message"])
    space.patch("ScaledObject", "qwen-engine", {"metadata": {"annotations": {"autoscaling.keda.sh/paused": None}}})
    wait_until("KEDA's HPA again", lambda: owners(space) == ["ScaledObject"])
    space.delete("InferenceService", "qwen")
    wait_until("the end", lambda: not space.list("ScaledObject") and not owners(space))
