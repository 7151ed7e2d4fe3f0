"""The ScaledObject, from which KEDA creates a HorizontalPodAutoscaler like Conveyor's own. Pure."""

from conveyor_api import names
from conveyor_api.quantities import parse_quantity
from conveyor_operator.kinds import SCALED_OBJECT
from conveyor_operator.loop.owner import Object


def build_scaled_object(autoscaler: Object, metrics_url: str) -> Object:
    """Build the ScaledObject that replaces the given HPA, with the same name, bounds, behavior and targets.

    KEDA reads each metric from the metrics server's page. If the metrics server returns an error,
    KEDA's HPA cannot read the metric.
    """
    spec, metadata = autoscaler["spec"], autoscaler["metadata"]
    page = f"{metrics_url}{names.DEMAND_PATH}?service={metadata['namespace']}/{_described(spec)}"
    return {
        "apiVersion": SCALED_OBJECT.api_version,
        "kind": SCALED_OBJECT.kind,
        "metadata": metadata,
        "spec": {
            "scaleTargetRef": spec["scaleTargetRef"],
            "minReplicaCount": spec["minReplicas"],
            "maxReplicaCount": spec["maxReplicas"],
            "advanced": {"horizontalPodAutoscalerConfig": {"name": metadata["name"], "behavior": spec["behavior"]}},
            "triggers": [_build_trigger(page, metric["object"]) for metric in spec["metrics"]],
        },
    }


def _described(spec: Object) -> str:
    return str(spec["metrics"][0]["object"]["describedObject"]["name"])


def _build_trigger(page: str, metric: Object) -> Object:
    source = metric["metric"]
    labels = source.get("selector", {}).get("matchLabels", {})
    return {
        "type": "metrics-api",
        "metadata": {
            "url": "&".join([page, *(f"{key}={value}" for key, value in labels.items())]),
            "format": "json",
            "valueLocation": source["name"],
            "targetValue": f"{parse_quantity(metric['target']['averageValue']).normalize():f}",
        },
    }
