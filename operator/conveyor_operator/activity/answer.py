"""The activity of services that may scale to zero, as `follower` reports it to the rest of the operator. Pure."""

from enum import Enum, auto


class Activity(Enum):
    """The activity of a service at all gateways together."""

    STEADY = auto()
    """Neither WAITING nor IDLE, or not known."""
    WAITING = auto()
    """The service is at zero, and a gateway holds requests for it."""
    IDLE = auto()
    """There are engines, but during the idle timeout no gateway has had a request for the service."""
