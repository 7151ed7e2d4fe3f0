"""Builds the HorizontalPodAutoscaler, which scales by two metrics of requests, and the PodDisruptionBudget. Pure."""

from typing import Final

from conveyor_api import names
from conveyor_api.quantities import format_quantity
from conveyor_api.spec import InferenceServiceSpec
from conveyor_operator.loop.owner import Object, Owner, build_metadata

_READABLE: Final = {"matchLabels": names.READABLE_GATEWAYS}


def build_autoscaler(owner: Owner, spec: InferenceServiceSpec, scale_up_period_seconds: int) -> Object | None:
    """Return the HPA with two Object metrics on the InferenceService; None without autoscaling or with an external one.

    The HPA uses the metric that needs more replicas. With KEDA, this HPA is not applied: `keda` builds a ScaledObject
    from it. With `AverageValue` the HPA computes ceil(total / target), regardless of the number of ready
    pods. It never scales to zero and ignores a Deployment at zero: `replicas.plan_zero` handles that. The queue depth
    is the sum over the gateways that respond. If one gateway does not respond, the metric for requests in flight is
    unknown. With one unknown metric, an HPA scales only up (docs/adr/0035-a-part-of-the-sum-scales-up.md).
    """
    autoscaling, in_flight, queue_depth = spec.autoscaling, spec.in_flight_target, spec.queue_depth_target
    if autoscaling is None or in_flight is None or queue_depth is None or autoscaling.is_external:
        return None
    metrics = [
        _object_metric(owner, in_flight, {"name": names.IN_FLIGHT_METRIC}),
        _object_metric(owner, queue_depth, {"name": names.QUEUE_DEPTH_METRIC, "selector": _READABLE}),
    ]
    name = names.engine_name(owner.name)
    content: Object = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
        "minReplicas": autoscaling.fewest_running,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": metrics,
        "behavior": autoscaling.fill_behavior(scale_up_period_seconds).to_manifest(),
    }
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": build_metadata(owner, name),
        "spec": content,
    }


def _object_metric(owner: Owner, target: float, metric: Object) -> Object:
    described = {"apiVersion": names.API_VERSION, "kind": names.KIND, "name": owner.name}
    return {
        "type": "Object",
        "object": {
            "describedObject": described,
            "metric": metric,
            "target": {"type": "AverageValue", "averageValue": format_quantity(target)},
        },
    }


def build_disruption_budget(owner: Owner) -> Object:
    """Return a budget that lets one pod at a time be evicted. A pod that is not ready may always be evicted."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": build_metadata(owner, names.engine_name(owner.name)),
        "spec": {
            "maxUnavailable": 1,
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            "selector": {"matchLabels": names.pod_selector(owner.name)},
        },
    }
