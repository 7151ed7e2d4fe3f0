"""What `GET /activity` says: which services that may go to zero have to be woken, and which may go to sleep.

Asked by the operator twice a second, so it names only those that something is to be done about. Each gateway speaks for
itself: one that waits is enough to wake a service, and all have to call it idle before it sleeps.
"""

from typing import TypedDict

from conveyor_gateway.admission.queues import Queues


class Activity(TypedDict):
    services: int  # that may go to zero
    waiting: list[str]  # `namespace/name`, with requests here and no engine to send them to
    idle: list[str]  # with engines, and for its idle timeout without a request here


def read_activity(queues: Queues) -> Activity:
    """Of this moment."""
    held = [(service, queue) for service, queue in queues.items() if service.idle_timeout_seconds is not None]
    return {
        "services": len(held),
        "waiting": [service.key for service, queue in held if queue.queued and not queue.num_engines],
        "idle": [
            service.key
            for service, queue in held
            if queue.num_engines and queue.idle_seconds >= (service.idle_timeout_seconds or 0)
        ],
    }
