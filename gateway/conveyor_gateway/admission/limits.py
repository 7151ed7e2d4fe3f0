"""The limits of a service's queue. Set by `queues` from the catalog; read by `service_queue` and `dispatcher`."""

from dataclasses import dataclass

from conveyor_gateway.watching.classes import WITHOUT_CLASSES, QueueClasses


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a service at this gateway. `place_limit` is the maximum number of requests on one engine.

    `fills_batches`: an engine's batch is filled before the next engine begins one.
    """

    max_queued_requests: int
    queue_timeout_seconds: float
    place_limit: int
    # Places of each engine that a client with its part of them does not get while others are active: those beyond the
    # batch, and at most so many of the batch, by the number of the others.
    num_beyond: int = 0
    most_kept: int = 0
    fills_batches: bool = False
    classes: QueueClasses = WITHOUT_CLASSES
    num_gateways: int = 1  # each gateway gets an equal part of a class's share of the places
