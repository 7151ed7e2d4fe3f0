"""Who serves custom.metrics.k8s.io: what `keeper` tells the rest of the operator. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricsApi:
    """Who serves custom.metrics.k8s.io. `owner` is `namespace/service` of another one, empty if it is us or nobody;
    `missing` says why nobody, empty if it is us or not known yet."""

    owner: str = ""
    api_service: str = ""
    missing: str = ""
    registered: bool = False
    """Both versions are ours."""
    left_out: bool = False
    """The installation has no metrics server; whether somebody else serves the group is not looked at."""
