"""Tests the autoscaler that is built from a spec: Conveyor's HPA, or KEDA's ScaledObject."""

from typing import Any

import pytest
from tests.operator.builders import build, build_one


@pytest.mark.parametrize(
    ("batching", "in_flight", "queue_depth"),
    [
        ({}, "192", "32"),
        ({"mode": "None"}, "1", "1"),
        ({"maxBatchSize": 4}, "3", "1"),
        ({"maxBatchSize": 10}, "7500m", "1"),
    ],
)
def test_the_autoscalers_targets_follow_from_the_batch(
    batching: dict[str, Any], in_flight: str, queue_depth: str
) -> None:
    spec = build_one("HorizontalPodAutoscaler", batching=batching, autoscaling={"maxReplicas": 4})["spec"]
    described = {"apiVersion": "conveyor.dev/v1alpha1", "kind": "InferenceService", "name": "qwen"}
    assert [m["object"]["describedObject"] for m in spec["metrics"]] == [described, described]
    assert [m["object"]["target"] for m in spec["metrics"]] == [
        {"type": "AverageValue", "averageValue": in_flight},
        {"type": "AverageValue", "averageValue": queue_depth},
    ]


def test_keda_gets_the_bounds_the_behavior_and_the_targets_of_the_autoscaler() -> None:
    spec: dict[str, Any] = {"batching": {"maxBatchSize": 10}}
    autoscaling = {"minReplicas": 2, "maxReplicas": 4}
    hpa = build_one("HorizontalPodAutoscaler", autoscaling=autoscaling, **spec)
    children = build(autoscaling=autoscaling | {"provider": "KEDA"}, **spec)
    assert ("HorizontalPodAutoscaler", "qwen-engine") not in children
    found = children["ScaledObject", "qwen-engine"]
    assert found["metadata"] == hpa["metadata"]
    page = "http://conveyor-metrics.conveyor-system.svc.cluster.local:8081/demand?service=default/qwen"
    assert found["spec"] == {
        "scaleTargetRef": hpa["spec"]["scaleTargetRef"],
        "minReplicaCount": 2,
        "maxReplicaCount": 4,
        "advanced": {
            "horizontalPodAutoscalerConfig": {"name": hpa["metadata"]["name"], "behavior": hpa["spec"]["behavior"]}
        },
        "triggers": [
            {
                "type": "metrics-api",
                "metadata": {"url": url, "format": "json", "valueLocation": metric, "targetValue": target},
            }
            for metric, url, target in (
                ("inference_in_flight", page, "7.5"),
                ("inference_queue_depth", f"{page}&gateways=Readable", "1"),
            )
        ],
    }


def build_behavior(**autoscaling: Any) -> Any:
    return build_one("HorizontalPodAutoscaler", autoscaling={"maxReplicas": 4, **autoscaling})["spec"]["behavior"]


def test_behavior_reaches_the_autoscaler_as_it_is() -> None:
    policies = [{"type": "Pods", "value": 1, "periodSeconds": 5}]
    behavior = {
        "scaleUp": {"policies": policies},
        "scaleDown": {"stabilizationWindowSeconds": 10, "policies": policies},
    }
    assert build_behavior(behavior=behavior) == behavior


def test_a_step_up_is_limited_where_behavior_does_not_say_by_how_much() -> None:
    default = build_behavior()
    assert default == {
        "scaleUp": {
            "policies": [
                {"type": "Pods", "value": 4, "periodSeconds": 420},
                {"type": "Percent", "value": 200, "periodSeconds": 420},
            ]
        }
    }
    down, window = {"scaleDown": {"selectPolicy": "Disabled"}}, {"stabilizationWindowSeconds": 60}
    assert build_behavior(behavior=down) == default | down
    assert build_behavior(behavior={"scaleUp": window}) == {"scaleUp": default["scaleUp"] | window}


@pytest.mark.parametrize(("desired", "got"), [(0, 1), (1, 1), (3, 3)])
def test_the_hpa_never_goes_to_zero_by_itself(desired: int, got: int) -> None:
    autoscaler = build_one("HorizontalPodAutoscaler", autoscaling={"minReplicas": desired, "maxReplicas": 4})
    assert autoscaler["spec"]["minReplicas"] == got
