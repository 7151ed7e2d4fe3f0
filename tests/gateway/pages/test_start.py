"""Tests a gateway's report about the start of an engine."""

from typing import Any

import pytest
from aiohttp import web
from tests.gateway.cluster import make_endpoint, make_service, make_slice, own_address
from tests.gateway.engine_servers import answering, refusing_address, running_engine

from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.errors import GatewayError
from conveyor_gateway.pages.start import read_start
from conveyor_gateway.watching.catalog import Catalog
from conveyor_protocol.pages import Start

QWEN, POD = "default/qwen", "uid-1"


def make_catalog(address: str, port: int) -> Catalog:
    catalog = Catalog()
    catalog.services.put(make_service("qwen", "default"))
    endpoint = make_endpoint(address) | {"targetRef": {"kind": "Pod", "uid": POD}}
    catalog.slices.put(make_slice("qwen-1", "default", "qwen", port, endpoint))
    return catalog


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ({"data": {"waiting": 0, "warm_up_seconds": 12.5}}, 12.5),
        ({"data": {"waiting": 0, "warm_up_seconds": None}}, None),
        ({"data": {"server_load": 0}}, None),
        ({"data": {"warm_up_seconds": "long"}}, None),
        ({"data": {"detail": "Not Found"}, "status": 404}, None),
    ],
    ids=["Conveyor's", "not told", "vLLM's", "no number", "no such page"],
)
async def test_the_gateway_reads_from_an_engine_how_long_it_warmed_up(
    answer: dict[str, Any], seconds: float | None
) -> None:
    async with running_engine(answering(web.json_response, **answer)) as engine:
        catalog = make_catalog(own_address(), engine.port)
        assert await read_start(catalog, Ledger(1 << 20), QWEN, POD) == Start(seconds)
        assert [request.path for request, _ in engine.requests] == ["/load"]


async def test_an_unknown_engine_is_not_queried() -> None:
    async with running_engine(answering(web.json_response, data={"warm_up_seconds": 1})) as engine:
        catalog = make_catalog(own_address(), engine.port)
        for service, pod in (("other/qwen", POD), (QWEN, "uid-2"), (QWEN, ""), ("", "")):
            with pytest.raises(GatewayError, match="no ready engine of"):
                await read_start(catalog, Ledger(1 << 20), service, pod)
        assert engine.requests == []


async def test_an_engine_that_does_not_answer_may_be_queried_again() -> None:
    with refusing_address() as (host, port), pytest.raises(GatewayError, match="no ready engine of"):
        await read_start(make_catalog(host, port), Ledger(1 << 20), QWEN, POD)
