"""The owner of custom.metrics.k8s.io, as `keeper` reports it to the rest of the operator. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsApi:
    """The owner of custom.metrics.k8s.io. `owner` is the `namespace/service` of another adapter, or empty.
    `missing` says why nobody serves the API, and is empty if Conveyor does or if the state is not known yet."""

    owner: str = ""
    api_service: str = ""
    missing: str = ""
    registered: bool = False
    """Whether both versions belong to Conveyor."""
    left_out: bool = False
    """The installation has no metrics server; whether somebody else serves the group is not looked at."""
