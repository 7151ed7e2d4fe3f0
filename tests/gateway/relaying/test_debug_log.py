"""Tests the lines that `--log-level=debug` adds: a request's route, and each engine to which it was sent."""

import asyncio
from pathlib import Path

import aiohttp
from aiohttp import web
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack, post


async def test_the_path_of_a_request_is_logged_without_its_content(
    kubeconfig: Path, cluster: Cluster, http: aiohttp.ClientSession
) -> None:
    flags = ("--log-level", "debug", "--watch-namespaces", cluster.namespace)
    with GatewayProcess(kubeconfig, *flags) as gateway:
        stack = Stack(gateway, cluster)
        await stack.apply_service()
        async with running_engine(answering(web.json_response, data={})) as engine:
            await stack.add_engine(engine.port)
            headers = {"X-Request-Id": "seven", "Authorization": "Bearer hidden-key"}
            status, _, _ = await post(http, stack.completions, b'{"prompt": "hidden-words"}', **headers)
            assert status == 200
        log = await asyncio.to_thread(lambda: gateway.log)
    lines = [line for line in log if "id=seven" in line and "level=DEBUG" in line]
    assert [line.split("event=")[1].split()[0] for line in lines] == ["admitted", "dispatched"]
    assert f"service={stack.key}" in lines[0]
    assert "engines=1" in lines[0]
    assert f":{engine.port}" in lines[1]
    assert "hidden" not in "\n".join(log)
