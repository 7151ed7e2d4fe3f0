"""Cancels a request with a reason. Used by the modules of `relaying` that wait for something."""

import asyncio

from conveyor_gateway.capacity.reservations import build_too_many
from conveyor_gateway.errors import GatewayError


class Cancellation:
    """Cancels the task that handles one request.

    If the client leaves, aiohttp cancels the task and `error` stays None.
    """

    __slots__ = ("error", "task")

    def __init__(self) -> None:
        task = asyncio.current_task()
        assert task is not None, "aiohttp runs every handler in a task"
        self.task = task
        self.error: GatewayError | None = None

    def cancel(self, error: GatewayError) -> None:
        """End the request with `error`."""
        self.error = self.error or error
        self.task.cancel()

    def evict(self) -> None:
        self.cancel(build_too_many())

    def clear(self) -> None:
        """Reset the cancellation, so that the task can still respond to the client."""
        self.task.uncancel()
