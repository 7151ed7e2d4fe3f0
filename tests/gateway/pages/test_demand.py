"""Tests the demand of all services, which is written in pieces. `tests/contract/test_demand.py` tests its content."""

import asyncio

import msgspec
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_service

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.pages.demand import encode_demand, read_demand
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.pages import Demand


async def test_the_demand_of_many_services_is_written_in_pieces() -> None:
    catalog = Catalog()
    queues = Queues(catalog, asyncio.get_running_loop(), NeverAsked(), Ledger(1), on_gone=lambda service: None)
    assert msgspec.json.decode(b"".join(encode_demand(queues)), type=Demand) == Demand({})
    for number in range(250):
        catalog.services.put(make_service(f"s{number}", "team"))
    pieces = list(encode_demand(queues))
    assert max(piece.count(b'"queue_depth"') for piece in pieces) == 100
    demand = msgspec.json.decode(b"".join(pieces), type=Demand)
    assert len(demand.services) == 250
    assert demand.services["team/s7"] == (await read_demand(queues, Ledger(1), "team/s7")).services["team/s7"]
