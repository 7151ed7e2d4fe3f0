"""Tests that engines get the name of an adapter that they know, whatever name the client used at the root.

During a rollout, the requests for a new adapter go to the engines that have it.
"""

import asyncio
import json
from io import BytesIO
from urllib.parse import quote

import aiohttp
from aiohttp import web
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post

from conveyor_protocol.request_headers import UNKNOWN_MODEL_HEADER


async def test_on_the_root_an_adapter_is_named_to_the_engine_as_the_engine_knows_it(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    own_name = f"model-of-{stack.cluster.namespace}"
    adapters = [{"name": "sql", "uri": "hf://org/sql"}]
    await stack.apply_service(model={"uri": "hf://org/model", "name": own_name}, adapters=adapters)
    await stack.claim_name(own_name)
    exact, by_key, other = (
        json.dumps({"model": name, "x": 1}, indent=3).encode()
        for name in (f"{own_name}:sql", f"{stack.key}:sql", f"{own_name}:other")
    )
    async with running_engine(answering(web.json_response, data={})) as engine:
        await stack.add_engine(engine.port)
        for body in (exact, by_key):
            assert (await post(http, f"{gateway.url}/v1/completions", body))[0] == 200
        status, body_404, _ = await post(http, f"{gateway.url}/v1/completions", other)
        assert (status, body_404["error"]["code"]) == (404, "model_not_found")
        assert (await post(http, f"{stack.url}/completions", other))[0] == 200, "there, the engine judges the name"
        form = aiohttp.FormData({"model": f"{stack.key}:sql"})
        form.add_field("image", BytesIO(b"x"), filename="a.jpg", content_type="image/jpeg")
        async with http.post(f"{gateway.url}/v1/images/classify", data=form) as answer:
            assert answer.status == 200, await answer.text()
    bodies = [body for _, body in engine.requests]
    assert (bodies[0], bodies[2]) == (exact, other)
    assert json.loads(bodies[1]) == {"model": f"{own_name}:sql", "x": 1}
    assert f'name="model"\r\n\r\n{own_name}:sql\r\n'.encode() in bodies[3]


async def test_while_a_rollout_brings_an_adapter_its_requests_go_to_the_engines_that_have_it(
    gateway: GatewayProcess, stack: Stack, http: aiohttp.ClientSession
) -> None:
    adapters = [{"name": "sql", "uri": "hf://org/sql"}]
    await stack.apply_service(adapters=adapters, queue={"timeout": "100s"})
    name = "qwen:sql"
    body, by_key = (json.dumps({"model": each}).encode() for each in (name, f"{stack.key}:sql"))
    error_body = {"error": {"message": "not here"}}
    not_found = answering(web.json_response, data=error_body, status=404, headers={UNKNOWN_MODEL_HEADER: quote(name)})
    async with running_engine(not_found) as old, running_engine(answering(web.json_response, data={})) as new:
        await stack.add_engine(old.port)
        requests = [
            asyncio.create_task(post(http, stack.completions, body)),
            asyncio.create_task(post(http, f"{gateway.url}/v1/completions", by_key)),
        ]
        await stack.wait(lambda: len(old.requests) >= 2)
        await stack.wait_demand(queued=2)
        await stack.add_engine(new.port)
        assert [(await each)[0] for each in requests] == [200, 200]
        assert {json.loads(sent)["model"] for _, sent in old.requests + new.requests} == {name}
        assert stack.metric("retries_total", reason="behind") == len(old.requests)
        before = len(old.requests)
        for _ in range(4):
            assert (await post(http, stack.completions, body))[0] == 200
        assert len(old.requests) <= before + 4
        await stack.set_engine_ready(new.port, False)
        await stack.complete_rollout()
        status, got, headers = await post(http, stack.completions, body)
    assert (status, got) == (404, error_body)
    assert UNKNOWN_MODEL_HEADER not in headers
