"""Tests which doubtful engines are asked, and when, if many services have lost their last ready engine."""

import asyncio
from collections import Counter
from itertools import islice, pairwise
from types import SimpleNamespace
from typing import Any, cast

from aiohttp import web
from tests.gateway.cluster import make_endpoint, make_slice, own_address
from tests.gateway.engine_servers import running_engine, silent_address

from conveyor_gateway.admission.doubtful import ENGINES_A_ROUND, DoubtfulEngines, take_turns
from conveyor_gateway.admission.queues import Queues
from conveyor_gateway.capacity.ledger import Ledger
from conveyor_gateway.watching.slices import SliceTable
from conveyor_protocol.request_headers import POD_HEADER

TENANT = [f"tenant/service-{number}" for number in range(500)]
POD = "engine-of-the-other"


def test_a_namespace_with_many_services_waits_for_those_with_few() -> None:
    services = [*TENANT, "other/one", "third/one", "third/two"]
    assert Counter(islice(take_turns(services, dict.fromkeys(services, 0.0)), 5)) == Counter(
        ["tenant/service-0", "tenant/service-1", "other/one", "third/one", "third/two"]
    )


def test_a_service_that_was_asked_longest_ago_is_next() -> None:
    looked = {"a/new": 3.0, "b/newer": 4.0, "a/old": 1.0, "b/older": 2.0}
    assert list(take_turns(looked, looked)) == ["a/old", "b/older", "a/new", "b/newer"]


def build_slice(service: str, host: str, port: int, *pods: str) -> dict[str, Any]:
    namespace, _, name = service.partition("/")
    endpoints = []
    for pod in pods:
        target = {"kind": "Pod", "name": pod, "namespace": namespace, "uid": f"uid-of-{pod}"}
        endpoints.append({**make_endpoint(host, ready=False), "targetRef": target})
    return make_slice(name, namespace, name, port, *endpoints)


async def test_one_tenant_s_silent_engines_do_not_keep_another_tenant_s_from_being_found() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(headers={POD_HEADER: POD})

    slices, ledger = SliceTable(), Ledger(1 << 20)
    waiting = SimpleNamespace(items=lambda service: [(service, SimpleNamespace(queued=1))])
    async with running_engine(answer) as engine:
        with silent_address() as (host, port):
            for service in TENANT:
                slices.put(build_slice(service, host, port, f"{service}-pod"))
            slices.put(build_slice("other/one", own_address(), engine.port, POD))
            looking = asyncio.create_task(DoubtfulEngines(slices, cast(Queues, waiting), ledger).look_for_ever())
            while not slices.is_trusted("other/one") and not looking.done():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not looking.done()
            asked = len([task for task in asyncio.all_tasks() if "_look(" in repr(task.get_coro())])
            looking.cancel()
            await asyncio.wait([looking])
    assert asked <= ENGINES_A_ROUND


async def test_silent_engines_do_not_delay_the_questions_to_those_that_get_requests() -> None:
    """A pod that gets the address of another one would get its prompts until it is asked."""
    asked: list[float] = []

    async def answer(_: web.Request) -> web.Response:
        asked.append(asyncio.get_running_loop().time())
        return web.Response(headers={POD_HEADER: POD})

    slices, ledger = SliceTable(), Ledger(1 << 20)
    waiting = SimpleNamespace(items=lambda service: [(service, SimpleNamespace(queued=1))])
    async with running_engine(answer) as engine:
        slices.put(build_slice("tenant/answering", own_address(), engine.port, POD))
        looking = asyncio.create_task(DoubtfulEngines(slices, cast(Queues, waiting), ledger).look_for_ever())
        with silent_address() as (host, port):
            while not slices.is_trusted("tenant/answering"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            for service in TENANT:
                slices.put(build_slice(service, host, port, f"{service}-pod"))
            async with asyncio.timeout(20):
                while len(asked) < 6:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            looking.cancel()
            await asyncio.wait([looking])
    assert max(later - earlier for earlier, later in pairwise(asked)) < 2
