"""One request of a client, with its hold in the ledger. Used by `listening` for pages and by `relaying` for engines.

No coroutine keeps a client's connection without such a hold, except for answers that are ready at once. So a connection
without a hold waits for its client, and the port may close it for a new one (`conveyor_http.server`).
"""

import asyncio
from typing import Self, cast

from aiohttp.web import BaseRequest

from conveyor_gateway.capacity.ledger import Hold, Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.watching.catalog import Service
from conveyor_gateway.watching.view import View
from conveyor_http.connection import Connection


class HeldRequest:
    """Holds a request while its handler runs, and cancels the handler with a reason. Must be created in its task.

    If the client leaves, aiohttp cancels the task and `error` stays None.
    """

    __slots__ = ("_connection", "_ledger", "_owner", "error", "hold", "task")

    hold: Hold

    def __init__(self, ledger: Ledger, request: BaseRequest, owner: Owner) -> None:
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs every handler in a task"
        self.task = task
        self.error: GatewayError | None = None
        self._ledger = ledger
        self._owner = owner
        self._connection = cast(Connection, request.protocol)

    def __enter__(self) -> Self:
        """Begin to hold. Raises GatewayError."""
        self.hold = self._ledger.hold(self._owner, self._evict)
        self._connection.is_kept = True
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.is_kept = None
        self._connection.owner = self.hold.owner.namespace
        self.hold.__exit__()

    def cancel(self, error: GatewayError) -> None:
        """End the request with `error`."""
        self.error = self.error or error
        self.task.cancel()

    def clear(self) -> None:
        """Reset the cancellation, so that the task can still respond to the client."""
        self.task.uncancel()

    def _evict(self, error: GatewayError) -> None:
        self._connection.is_kept = False
        self.cancel(error)


def find_owner(service: Service | None, view: View) -> Owner:
    """Return the owner of a request. service: None while it is not known."""
    namespace, key = ("", "") if service is None else (service.namespace, service.key)
    return Owner(namespace, key, view.name_client(service))
