"""Resource requests and limits of the containers in an engine's pod. Pure."""

from typing import Final

from conveyor_api.resources import Resources
from conveyor_api.status import ResourcesStatus
from conveyor_operator.loop.owner import Object

# Without a request a pod with a GPU would be BestEffort: the first to go when its node runs short. Enough to start
# with, little enough for any node; what a model really takes only its team knows.
_DEFAULT_REQUESTS: Final = {"cpu": "500m", "memory": "1Gi"}
_COMPUTE: Final = ("cpu", "memory", "ephemeral-storage")
# A fetch streams to the volume: 178 MiB is the most that it took, from a bucket by eight connections.
_FETCH_REQUESTS: Final = {"cpu": "100m", "memory": "256Mi", "ephemeral-storage": "64Mi"}
_FETCH_LIMITS: Final = {"cpu": "4", "memory": "2Gi", "ephemeral-storage": "2Gi"}


def complete_resources(resources: Resources) -> Object:
    """Add requests for cpu and memory if neither request nor limit is set. Kubernetes uses a limit as the request."""
    given = {kind: dict(amounts) for kind, amounts in resources.to_manifest().items() if amounts}
    named = resources.requests.keys() | resources.limits.keys()
    missing = {name: amount for name, amount in _DEFAULT_REQUESTS.items() if name not in named}
    return given | ({"requests": missing | given.get("requests", {})} if missing else {})


def tell_resources(resources: Resources) -> ResourcesStatus:
    """The same for the status."""
    told = {
        kind: {name: str(value) for name, value in amounts.items()}
        for kind, amounts in complete_resources(resources).items()
    }
    return ResourcesStatus(**told)


def of_fetch(resources: Object) -> Object:
    """Little, so that it finds room beside an engine; of what `resources` name, as a quota may ask for it."""
    limits = resources.get("limits", {})
    named = resources.get("requests", {}).keys() | limits.keys()
    asked = {
        "requests": {name: amount for name, amount in _FETCH_REQUESTS.items() if name in named},
        "limits": {name: amount for name, amount in _FETCH_LIMITS.items() if name in limits},
    }
    return {kind: amounts for kind, amounts in asked.items() if amounts}


def without_devices(resources: Object) -> Object:
    """CPU and memory only: fetching needs no GPU, but a quota may ask every container for its share."""
    return {
        kind: {name: value for name, value in amounts.items() if name in _COMPUTE}
        for kind, amounts in resources.items()
    }
