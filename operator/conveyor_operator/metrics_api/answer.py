"""The owner of custom.metrics.k8s.io, as `keeper` reports it to the rest of the operator. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsApi:
    """The state of custom.metrics.k8s.io.

    owner: the `namespace/service` of another adapter, or "". api_service: that adapter's APIService, or "". missing:
    why no server provides the API; "" if Conveyor or another adapter does, or if the state is not known yet.
    """

    owner: str = ""
    api_service: str = ""
    missing: str = ""
    registered: bool = False
    """Whether both versions belong to Conveyor."""
    left_out: bool = False
    """Whether the installation has no metrics server.

    Then the operator does not check whether another adapter serves the group.
    """
