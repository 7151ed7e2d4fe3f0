"""Serves `GET /waiting?service=<namespace>/<name>`: whose requests wait in this gateway's queue of the service.

The console requests it while somebody looks at the service. The work is bounded by the number of classes, and not by
that of the requests.
"""

from typing import Final

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.watching.classes import UNCLASSED
from conveyor_protocol.pages import WaitingClient, WaitingClients

_MAX_CLIENTS: Final = 20  # of a class


def read_waiting(queues: Queues, service: str) -> WaitingClients:
    """Return the clients of all classes; none if the service is unknown."""
    return WaitingClients(
        [
            WaitingClient(client, request_class.name, number, seconds)
            for known, queue in queues.items(service)
            for request_class in known.classes.ordered or (UNCLASSED,)
            for client, number, seconds in queue.list_waiting_clients(request_class.level, _MAX_CLIENTS)
        ]
    )
