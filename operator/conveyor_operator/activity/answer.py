"""What requests there are for a service that may go to zero: what `follower` tells the rest of the operator. Pure."""

from enum import Enum, auto


class Activity(Enum):
    """Of all gateways together."""

    STEADY = auto()
    """Neither of the others, or not known."""
    WAITING = auto()
    """It is asleep, and a gateway holds requests for it."""
    IDLE = auto()
    """There are engines, and no gateway has had a request for the service's idle timeout."""
