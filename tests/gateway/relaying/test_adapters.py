"""Tests that engines get the name of an adapter that they know, whatever name the client used at the root."""

import json
from io import BytesIO

import aiohttp
from aiohttp import web
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post


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
