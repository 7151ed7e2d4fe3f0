"""Runs the gateway's own queries to engines, each with a hold: places, used tokens, and pages for clients."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from conveyor_gateway.capacity.ledger import Hold, Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.errors import GatewayError

T = TypeVar("T")


async def run_held(ledger: Ledger, owner: Owner, query: Callable[[Hold], Awaitable[T]]) -> T:
    """Await `query(hold)` with a hold of `owner`. An eviction cancels the query.

    Raises GatewayError if the ledger refuses or evicts the hold.
    """
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"

    def evict(error: GatewayError) -> None:
        task.cancel()

    with ledger.hold(owner, evict) as hold:
        try:
            return await query(hold)
        except asyncio.CancelledError:
            if hold.evicted_by is None:
                raise
            task.uncancel()
            raise hold.evicted_by from None
