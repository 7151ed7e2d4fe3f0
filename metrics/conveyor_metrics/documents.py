"""The server's responses as JSON objects: discovery, OpenAPI, metric values, errors. Pure; called by `app`.

Shapes: k8s.io/metrics pkg/apis/custom_metrics/{v1beta1,v1beta2}/types.go, apimachinery meta/v1 APIGroup,
APIResourceList and Status. The two versions differ only in how an item names its metric and its window.
This module knows neither HTTP nor gateways.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

from conveyor_api.names import (
    API_VERSION,
    CLASS_QUEUED_METRIC,
    CLASS_WAIT_METRIC,
    CRD_NAME,
    IN_FLIGHT_METRIC,
    KIND,
    LIMITED_ENGINES_METRIC,
    METRICS_GROUP,
    METRICS_VERSIONS,
    QUEUE_DEPTH_METRIC,
    REQUESTS_METRIC,
    RUNNING_LIMIT_METRIC,
    WAITING_METRIC,
)
from conveyor_kube.wanted_json import Json

RESOURCE = CRD_NAME
"""The plural with its group, as the HorizontalPodAutoscaler spells the described object in the path."""

METRICS = {IN_FLIGHT_METRIC: "in_flight", QUEUE_DEPTH_METRIC: "queue_depth"}
"""Metric name -> field of `demand.DemandSum`."""

COUNT_METRICS = {REQUESTS_METRIC: "requests", WAITING_METRIC: "waiting"}
"""Metric name -> field of `demand.DemandSum`."""

CLASS_METRICS = {CLASS_QUEUED_METRIC: "queued", CLASS_WAIT_METRIC: "wait_seconds"}
"""Metric name -> field of `demand.ClassSum`. The label `request_class` names the class of `queue.classes`."""

LIMIT_METRICS = {RUNNING_LIMIT_METRIC: "running_limit", LIMITED_ENGINES_METRIC: "limited_engines"}
"""Metric name -> field of `demand.DemandSum`. LIMITED_ENGINES_METRIC needs the label `limit_reason`."""

NO_LABELS: Final[Mapping[str, str]] = {}


def build_group() -> Json:
    """Return the API group. The HorizontalPodAutoscaler uses its preferred version."""
    versions = [{"groupVersion": f"{METRICS_GROUP}/{version}", "version": version} for version in METRICS_VERSIONS]
    return {
        "kind": "APIGroup",
        "apiVersion": "v1",
        "name": METRICS_GROUP,
        "versions": versions,
        "preferredVersion": versions[0],
    }


def build_group_list() -> Json:
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [build_group()]}


def build_resource_list(version: str) -> Json:
    resources = [
        {
            "name": f"{RESOURCE}/{metric}",
            "singularName": "",
            "namespaced": True,
            "kind": "MetricValueList",
            "verbs": ["get"],
        }
        for metric in (*METRICS, *COUNT_METRICS, *CLASS_METRICS, *LIMIT_METRICS)
    ]
    group_version = f"{METRICS_GROUP}/{version}"
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": resources,
    }


def build_openapi_v2() -> Json:
    """Return a document without paths. Without a document, the API server would log an error every minute."""
    info = {"title": "Conveyor metrics", "version": METRICS_VERSIONS[0]}
    return {"swagger": "2.0", "info": info, "paths": {}}


def build_openapi_v3_index() -> Json:
    """Return an index without documents, for the same reason as `build_openapi_v2`."""
    return {"paths": {}}


def build_metric_values(
    version: str, namespace: str, name: str, metric: str, value: int, labels: Mapping[str, str] = NO_LABELS
) -> Json:
    """Return a MetricValueList with exactly one item, as Object metrics require. `value`: the current value."""
    selector = {"matchLabels": labels} if labels else None
    item: Json = {
        "describedObject": {
            "kind": KIND,
            "namespace": namespace,
            "name": name,
            "apiVersion": API_VERSION,
        },
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": str(value),
    }
    if version == "v1beta1":
        item |= {"metricName": metric, "window": 0, "selector": selector}
    else:
        item |= {"metric": {"name": metric, "selector": selector}, "windowSeconds": 0}
    return {
        "kind": "MetricValueList",
        "apiVersion": f"{METRICS_GROUP}/{version}",
        "metadata": {},
        "items": [item],
    }


def build_status(code: int, reason: str, message: str) -> Json:
    """Return a `metav1.Status` for an error."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
