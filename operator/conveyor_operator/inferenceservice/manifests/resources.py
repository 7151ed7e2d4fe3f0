"""What the containers of an engine's pod ask of the node. Pure."""

from typing import Final

from conveyor_api.resources import Resources
from conveyor_api.status import ResourcesStatus
from conveyor_operator.loop.owner import Object

# Without a request a pod with a GPU would be BestEffort: the first to go when its node runs short. Enough to start
# with, little enough for any node; what a model really takes only its team knows.
_DEFAULT_REQUESTS: Final = {"cpu": "500m", "memory": "1Gi"}
_COMPUTE: Final = ("cpu", "memory", "ephemeral-storage")


def complete_resources(resources: Resources) -> Object:
    """With requests for cpu and memory where none is given, nor a limit, which Kubernetes takes for a request."""
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


def without_devices(resources: Object) -> Object:
    """CPU and memory only: fetching needs no GPU, but a quota may ask every container for its share."""
    return {
        kind: {name: value for name, value in amounts.items() if name in _COMPUTE}
        for kind, amounts in resources.items()
    }
