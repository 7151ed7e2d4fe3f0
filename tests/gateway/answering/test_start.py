"""What a gateway says of the start of an engine."""

import asyncio
from typing import Any

import pytest
from aiohttp import web
from tests.gateway.builders import NeverAsked
from tests.gateway.cluster import make_endpoint, make_service, make_slice, own_address
from tests.gateway.engine_servers import answering, refusing_address, running_engine

from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.answering.start import read_start
from conveyor_gateway.errors import Unavailable
from conveyor_protocol.pages import Start

QWEN, POD = "default/qwen", "uid-1"


def make_queues(address: str, port: int) -> Queues:
    queues = Queues(asyncio.get_running_loop(), NeverAsked(), on_gone=lambda key: None)
    queues.catalog.services.put(make_service("qwen", "default"))
    endpoint = make_endpoint(address) | {"targetRef": {"kind": "Pod", "uid": POD}}
    queues.catalog.slices.put(make_slice("qwen-1", "default", "qwen", port, endpoint))
    return queues


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
async def test_an_engine_is_asked_how_long_it_warmed_up(answer: dict[str, Any], seconds: float | None) -> None:
    async with running_engine(answering(web.json_response, **answer)) as engine:
        queues = make_queues(own_address(), engine.port)
        assert await read_start(queues, QWEN, POD) == Start(seconds)
        assert [request.path for request, _ in engine.requests] == ["/load"]


async def test_an_engine_that_is_not_known_here_is_not_asked() -> None:
    async with running_engine(answering(web.json_response, data={"warm_up_seconds": 1})) as engine:
        queues = make_queues(own_address(), engine.port)
        for service, pod in (("other/qwen", POD), (QWEN, "uid-2"), (QWEN, ""), ("", "")):
            with pytest.raises(Unavailable):
                await read_start(queues, service, pod)
        assert engine.requests == []


async def test_an_engine_that_does_not_answer_may_be_asked_again() -> None:
    with refusing_address() as (host, port), pytest.raises(Unavailable):
        await read_start(make_queues(host, port), QWEN, POD)
