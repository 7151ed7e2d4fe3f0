"""What `GET /activity` says: which services that may go to zero have to be woken, and which may go to sleep.

Asked by the operator twice a second, so it names only those that something is to be done about, and no more of a
namespace than the page has room for. Each gateway speaks for itself: one that waits is enough to wake a service, and
all have to call it idle before it sleeps.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final, TypedDict

from conveyor_gateway.admission.queues import Queues

MAX_NAMES: Final = 100  # of one namespace and in one list; the others come when these are done


class Activity(TypedDict):
    services: int  # that may go to zero
    waiting: list[str]  # `namespace/name`, with requests here and no engine to send them to
    idle: list[str]  # with engines, and for its idle timeout without a request here


def read_activity(queues: Queues) -> Activity:
    """Of this moment."""
    held = [
        (service.key, queue, seconds)
        for service, queue in queues.items()
        if (seconds := service.idle_timeout_seconds) is not None
    ]
    waiting = (key for key, queue, _ in held if queue.queued and not queue.num_engines)
    idle = (key for key, queue, seconds in held if queue.num_engines and queue.idle_seconds >= seconds)
    return {"services": len(held), "waiting": [*_limit(waiting)], "idle": [*_limit(idle)]}


def _limit(keys: Iterable[str]) -> Iterator[str]:
    named: Counter[str] = Counter()
    for key in keys:
        namespace, _, _ = key.partition("/")
        named[namespace] += 1
        if named[namespace] <= MAX_NAMES:
            yield key
