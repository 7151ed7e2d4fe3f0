"""Tests classes of requests through a whole gateway: the header, the order, and what engines and metrics get."""

import asyncio
import json
import re

import aiohttp
import yaml
from aiohttp import web
from tests.gateway.engine_servers import SlowEngine, answering, running_engine
from tests.gateway.stack import Stack, post

from e2e.cluster.paths import REPOSITORY

CLASSES = [
    {"name": "chat", "level": 0},
    {"name": "tools", "level": 2},
    {"name": "batch", "level": 100, "maxRequests": 1},
]
QUEUE = {"classes": CLASSES, "maxClass": "tools", "defaultClass": "tools"}
BATCH_OF_ONE = {"batching": {"maxBatchSize": 1}}  # two places per engine


async def test_a_better_class_goes_first_and_the_engine_gets_its_level(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    await stack.apply_service(**BATCH_OF_ONE, queue=QUEUE)
    slow = SlowEngine()
    async with running_engine(slow.handle) as engine:
        await stack.add_engine(engine.port)
        held = [asyncio.create_task(post(http, stack.completions)) for _ in range(2)]
        await stack.wait_demand(dispatched=2)
        bodies = [b'{"n": "batch", "priority": 7}', b'{"n": "tools"}', b'{"n": "chat"}']
        headers = [{}, {"X_Request_Class": "tools"}, {"X_Request_Class": "chat"}]
        waiting = []
        for number, (body, named) in enumerate(zip(bodies, headers, strict=True), start=1):
            waiting.append(asyncio.create_task(post(http, stack.completions, body, **named)))
            await stack.wait_demand(queued=number)
        queued = [stack.metric("class_queued_requests", request_class=each["name"]) for each in CLASSES]
        assert queued == [0, 2, 1], "a client reaches queue.maxClass at most"
        classes = (await asyncio.to_thread(stack.demand))["classes"]
        assert [classes[each["name"]]["queued"] for each in CLASSES] == queued
        assert [classes[each["name"]]["wait_seconds"] > 0 for each in CLASSES] == [False, True, True]
        status, body, answer_headers = await post(http, stack.completions, X_Request_Class="batch")
        assert (status, body["error"]["code"]) == (429, "queue_full")
        assert 1 <= int(answer_headers["Retry-After"]) <= 60
        slow.gate.set()
        assert [status for status, *_ in await asyncio.gather(*held, *waiting)] == [200] * 5
        sent = [(request.headers["X-Request-Level"], json.loads(read).get("n")) for request, read in engine.requests]
        assert sent == [("2", None), ("2", None), ("2", "tools"), ("2", "chat"), ("100", "batch")]
    assert stack.metric("lowered_requests_total") == 1
    assert stack.metric("class_queue_wait_seconds_count", request_class="tools") == 4
    await stack.apply_service(**BATCH_OF_ONE, queue={"classes": CLASSES[:1]})
    assert stack.metric("class_queue_wait_seconds_count", request_class="tools") == 0, (
        "the series of the class are gone"
    )


async def test_the_service_of_the_page_chooses_classes_as_the_page_says(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    page = (REPOSITORY / "docs/priorities.md").read_text()
    (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    await stack.apply_service(**yaml.safe_load(manifest)["spec"])
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        for body, named in (
            ({"priority": 2}, {}),
            ({"priority": -1}, {}),
            ({}, {"X_Request_Class": "batch"}),
            ({}, {}),
        ):
            assert (await post(http, stack.completions, json.dumps(body).encode(), **named))[0] == 200
        assert [request.headers["X-Request-Level"] for request, _ in engine.requests] == ["10", "0", "10", "1"]


async def test_a_class_that_is_not_there_and_a_priority_without_classes_are_refused(
    stack: Stack, http: aiohttp.ClientSession
) -> None:
    status, body, _ = await post(http, stack.completions, b'{"priority": 3}')
    assert (status, body["error"]["code"], body["error"]["param"]) == (400, "no_classes", "priority")
    await stack.apply_service(queue=QUEUE)
    status, body, _ = await post(http, stack.completions, X_Request_Class="gold")
    assert (status, body["error"]["code"]) == (400, "unknown_class")
    assert "its classes are chat, tools, batch" in body["error"]["message"]
