"""Tests each field of the API's JSON, because Kubernetes' clients read it strictly."""

from datetime import UTC, datetime, timedelta

from conveyor_metrics import documents


def test_v1beta2_names_the_metric_in_an_object_and_the_window_in_seconds() -> None:
    values = documents.build_metric_values("v1beta2", "default", "qwen", "inference_in_flight", 17)
    (item,) = values.pop("items")
    item.pop("timestamp")
    assert values == {
        "kind": "MetricValueList",
        "apiVersion": "custom.metrics.k8s.io/v1beta2",
        "metadata": {},
    }
    assert item == {
        "describedObject": {
            "kind": "InferenceService",
            "namespace": "default",
            "name": "qwen",
            "apiVersion": "conveyor.dev/v1alpha1",
        },
        "metric": {"name": "inference_in_flight", "selector": None},
        "windowSeconds": 0,
        "value": "17",
    }


def test_v1beta1_names_the_metric_and_the_window_flat() -> None:
    values = documents.build_metric_values("v1beta1", "default", "qwen", "inference_queue_depth", 0)
    (item,) = values["items"]
    assert values["apiVersion"] == "custom.metrics.k8s.io/v1beta1"
    assert item["metricName"] == "inference_queue_depth"
    assert (item["window"], item["selector"], item["value"]) == (0, None, "0")
    assert not {"metric", "windowSeconds"} & item.keys()


def test_the_timestamp_is_now_in_the_form_of_kubernetes() -> None:
    (item,) = documents.build_metric_values("v1beta2", "a", "b", "inference_in_flight", 1)["items"]
    stamp = datetime.strptime(item["timestamp"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - stamp) < timedelta(minutes=1)


def test_discovery_lists_both_metrics_in_both_versions_and_prefers_v1beta2() -> None:
    assert documents.build_group()["preferredVersion"]["version"] == "v1beta2"
    for version in ("v1beta1", "v1beta2"):
        names = [resource["name"] for resource in documents.build_resource_list(version)["resources"]]
        assert names == [
            "inferenceservices.conveyor.dev/inference_in_flight",
            "inferenceservices.conveyor.dev/inference_queue_depth",
            "inferenceservices.conveyor.dev/inference_requests",
            "inferenceservices.conveyor.dev/inference_waiting_requests",
            "inferenceservices.conveyor.dev/inference_class_queued",
            "inferenceservices.conveyor.dev/inference_class_wait_seconds",
            "inferenceservices.conveyor.dev/inference_running_limit",
            "inferenceservices.conveyor.dev/inference_limited_engines",
        ]
