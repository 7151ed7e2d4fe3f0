"""Serves `GET /activity`: the services that must start from zero, and those that may scale to zero.

The operator requests it twice a second. So it lists only services that need an action, and a limited number for each
namespace. Each gateway reports its own requests: a service starts if one gateway has a waiting request, and scales to
zero if all gateways report it as idle.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from conveyor_gateway.admission.queues import Queues
from conveyor_protocol.pages import Activity

MAX_NAMES: Final = 1_000  # for each namespace and list; above any real use, but a tenant could create more


def read_activity(queues: Queues) -> Activity:
    """Return which services need an action of the operator now."""
    held = [
        (service, queue, seconds)
        for service, queue in queues.items()
        if (seconds := service.idle_timeout_seconds) is not None
    ]
    waiting = (service.key for service, queue, _ in held if service.is_asleep and queue.queued)
    idle = (service.key for service, queue, seconds in held if queue.num_engines and queue.idle_seconds >= seconds)
    return Activity(len(held), frozenset(_limit(waiting)), frozenset(_limit(idle)))


def _limit(keys: Iterable[str]) -> Iterator[str]:
    named: Counter[str] = Counter()
    for key in keys:
        namespace, _, _ = key.partition("/")
        named[namespace] += 1
        if named[namespace] <= MAX_NAMES:
            yield key
