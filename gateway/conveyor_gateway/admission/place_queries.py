"""Queries for places on the engines of one service, each with a hold in the ledger. Built by `queues`."""

import contextlib
from dataclasses import dataclass

from conveyor_gateway.capacity.ledger import Hold, Ledger
from conveyor_gateway.capacity.parts import Owner
from conveyor_gateway.capacity.queries import run_held
from conveyor_gateway.engines.session import EngineSession
from conveyor_gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class PlaceQueries:
    """Sends the queries of a service. The ledger counts them for the service, and for no client."""

    engines: EngineSession
    ledger: Ledger
    owner: Owner

    async def request_place(self, address: str, level: int) -> bool:
        """Return True once the engine at `address` has reserved a place.

        Returns False if the query fails, or if the ledger has no room for it.
        """

        async def request(hold: Hold) -> bool:
            return await self.engines.request_place(hold, address, level)

        try:
            return await run_held(self.ledger, self.owner, request)
        except GatewayError:
            return False

    async def give_place_back(self, address: str) -> None:
        """Release a place. If the ledger has no room for that, the engine releases it after a while."""

        async def give_back(hold: Hold) -> None:
            await self.engines.give_place_back(hold, address)

        with contextlib.suppress(GatewayError):
            await run_held(self.ledger, self.owner, give_back)
