"""Counts the requests that ask for more replicas while engines start. Pure; used by `demand` and `conveyor_insight`.

A starting engine will run a batch of the requests that wait now, so these requests ask for no further engine
(docs/adr/0129-starting-engines-have-places.md). Counts are in places of full batches.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engines:
    """The replicas of one service, and the numbers with which its autoscaler compares requests.

    The targets are None if the replicas are fixed, or if an autoscaler that is not Conveyor's sets them.
    """

    batch_size: int
    ready: int
    starting: int
    """Desired replicas that are not ready yet, without those that fail to start."""
    desired: int
    in_flight_target: float | None = None
    queue_depth_target: float | None = None

    @property
    def starting_places(self) -> int:
        """Return how many requests the starting engines will run at once."""
        return self.starting * self.batch_size


def count_in_flight(requests: int, waiting: int, engines: Engines, from_start: int = 0) -> int:
    """Return the requests in flight that the autoscaler compares with its target; never more than `requests`.

    Requests for which a starting engine has a place are compared with whole batches, and so are the `from_start`
    requests at engines that arrived while no engine was ready. The others are compared with the target, which leaves a
    part of each batch free. While no engine is ready, all requests are compared with batches.
    """
    held = min(requests, min(waiting, engines.starting_places) + from_start) if engines.ready else requests
    return requests - held + _bound(held, engines.in_flight_target, engines)


def count_queue_depth(waiting: int, engines: Engines) -> int:
    """Return the waiting requests for which no starting engine has a place; never more than `waiting`.

    While no engine is ready, the result asks for no more engines than the batches of all waiting requests need.
    """
    beyond = max(0, waiting - engines.starting_places)
    return beyond if engines.ready else min(beyond, _bound(waiting, engines.queue_depth_target, engines))


def _bound(requests: int, target: float | None, engines: Engines) -> int:
    """Return `requests`, or the most that asks for only as many engines as the batches of `requests` need.

    If no engine is ready and none can start, more replicas would not help, so the result asks for no more of them.
    """
    if target is None:
        return requests
    needed = -(-requests // engines.batch_size)
    if not engines.ready and not engines.starting and engines.desired:
        needed = min(needed, engines.desired)
    return min(requests, math.floor(target * needed))
