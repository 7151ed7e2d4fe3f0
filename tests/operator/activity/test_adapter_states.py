"""Tests how the operator polls gateways for what engines have made of adapters."""

import asyncio
import contextlib
from collections.abc import Callable

import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_kube.gateways import Gateway
from conveyor_operator.activity import adapter_states
from conveyor_operator.activity.adapter_states import AdapterStates
from conveyor_protocol.pages import AdapterCounts

QWEN = "default/qwen"


async def until(probe: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not probe():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_service_is_polled_until_it_has_no_adapters_and_marked_when_they_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(adapter_states, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(adapter_states, "_OFTEN_SECONDS", 0.02)
    data = {"adapters": {"sql": {"/a": {"ready": 1, "serving": 1}}}}
    marked: list[str] = []
    async with running_engine(answering(web.json_response, data=data)) as gateway:
        states = AdapterStates(lambda: [Gateway(own_address(), gateway.port, serving=True)], marked.append)
        running = asyncio.create_task(states.run())
        assert states.follow(QWEN, is_pending=True) is None
        await until(lambda: marked)
        assert states.follow(QWEN, is_pending=True) == {"sql": {"/a": AdapterCounts(ready=1, serving=1)}}
        await until(lambda: len(gateway.requests) > 3)
        assert marked == [QWEN], "the same answer marks nothing"
        states.follow(QWEN, is_pending=False)
        await until(lambda: not states._pending)
        await asyncio.sleep(0.1)
        polls = len(gateway.requests)
        await asyncio.sleep(0.2)
        assert len(gateway.requests) == polls, "all loaded: seldom"
        data["adapters"]["sql"]["/a"]["message"] = "x" * 2000
        states.follow(QWEN, is_pending=True)
        await until(lambda: len(gateway.requests) > polls + 2)
        assert marked == [QWEN], "an answer that cannot be read is none"
        assert states.follow(QWEN, is_pending=None) is None
        await asyncio.sleep(0.1)
        polls = len(gateway.requests)
        await asyncio.sleep(0.2)
        assert len(gateway.requests) == polls
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
