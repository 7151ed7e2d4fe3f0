"""Computes resource requests and limits of the containers in an engine's pod. Pure."""

import math
from typing import Final

from conveyor_api.quantities import format_quantity, parse_quantity
from conveyor_api.resources import Resources
from conveyor_api.status import ResourcesStatus
from conveyor_operator.loop.owner import Object

# Without a request, a pod with a GPU would be BestEffort, and evicted first when its node runs out of memory. These
# defaults are enough to start and fit on any node. Only the model's team knows what the model really needs.
_DEFAULT_REQUESTS: Final = {"cpu": "500m", "memory": "1Gi"}
_COMPUTE: Final = ("cpu", "memory", "ephemeral-storage")
# Request and limit of a Job's container, and its limit if a larger one would be too many times the request; CPU in
# thousandths, the others in Mi. A fetch streams to the volume: at most 178 MiB in measurements (eight connections).
_OF_JOB: Final = {"cpu": (100, 4000, 1000), "memory": (256, 2048, 2048), "ephemeral-storage": (64, 2048, 2048)}


def complete_resources(resources: Resources) -> Object:
    """Add requests for cpu and memory where neither request nor limit is given. Kubernetes uses a limit as request."""
    given = {kind: dict(amounts) for kind, amounts in resources.to_manifest().items() if amounts}
    named = resources.requests.keys() | resources.limits.keys()
    missing = {name: amount for name, amount in _DEFAULT_REQUESTS.items() if name not in named}
    return given | ({"requests": missing | given.get("requests", {})} if missing else {})


def describe_resources(resources: Resources) -> ResourcesStatus:
    """Return the completed resources for the status."""
    completed = {
        kind: {name: str(value) for name, value in amounts.items()}
        for kind, amounts in complete_resources(resources).items()
    }
    return ResourcesStatus(**completed)


def of_job(resources: Object) -> Object:
    """Return the resources of a Job for a service, given those of its engine: small, so that it fits beside an engine.

    Set only the resources that `resources` names: a quota may require them, and no others are needed. A limit is at
    most as many times its request as the engine's, because a policy may limit this ratio (docs/adr/0190).
    """
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    small: Object = {}
    for name, (request, limit, least_limit) in _OF_JOB.items():
        if name in limits:
            ratio = _ratio(requests.get(name, limits[name]), limits[name])
            limit = limit if limit <= request * ratio else least_limit
            request = max(request, math.ceil(limit / ratio))
            small.setdefault("limits", {})[name] = _format(name, limit)
        if name in limits or name in requests:
            small.setdefault("requests", {})[name] = _format(name, request)
    return small


def _ratio(request: int | str, limit: int | str) -> float:
    """Return how many times the request the limit is."""
    amount = parse_quantity(request)
    return float(parse_quantity(limit) / amount) if amount else math.inf


def _format(name: str, amount: int) -> str:
    if name == "cpu":
        return format_quantity(amount / 1000)
    return f"{amount}Mi" if amount % 1024 else f"{amount // 1024}Gi"


def without_devices(resources: Object) -> Object:
    """Return the resources without devices: a fetch needs no GPU, but a quota may require the other resources."""
    return {
        kind: {name: value for name, value in amounts.items() if name in _COMPUTE}
        for kind, amounts in resources.items()
    }
