"""Computes resource requests and limits of the containers in an engine's pod. Pure."""

from typing import Final

from conveyor_api.resources import Resources
from conveyor_api.status import ResourcesStatus
from conveyor_operator.loop.owner import Object

# Without a request, a pod with a GPU would be BestEffort, and evicted first when its node runs out of memory. These
# defaults are enough to start and fit on any node. Only the model's team knows what the model really needs.
_DEFAULT_REQUESTS: Final = {"cpu": "500m", "memory": "1Gi"}
_COMPUTE: Final = ("cpu", "memory", "ephemeral-storage")
# A fetch streams to the volume. In measurements it used at most 178 MiB of memory (eight connections to a bucket).
_FETCH_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "64Mi"}
_FETCH_LIMITS: Final = {"cpu": "4", "memory": "2Gi", "ephemeral-storage": "2Gi"}


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


def of_fetch(resources: Object) -> Object:
    """Return the resources of the Job's fetch: small, so that it fits beside an engine.

    Set only the resources that `resources` names: a quota may require them, and no others are needed.
    """
    limits = resources.get("limits", {})
    named = resources.get("requests", {}).keys() | limits.keys()
    small = {
        "requests": {name: amount for name, amount in _FETCH_REQUESTS.items() if name in named},
        "limits": {name: amount for name, amount in _FETCH_LIMITS.items() if name in limits},
    }
    return {kind: amounts for kind, amounts in small.items() if amounts}


def without_devices(resources: Object) -> Object:
    """Return the resources without devices: a fetch needs no GPU, but a quota may require the other resources."""
    return {
        kind: {name: value for name, value in amounts.items() if name in _COMPUTE}
        for kind, amounts in resources.items()
    }
