"""Tests the pages in headless Chromium: keyboard, widths, dark and light, and changes that arrive by themselves."""

import asyncio
import subprocess
from pathlib import Path

import aiohttp
import pytest
from tests.console.process import ConsoleProcess
from tests.console.test_console import HOSTILE, set_ready
from tests.contract.serving import serving
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess

from e2e import browser
from e2e.cluster.api import Api

pytestmark = pytest.mark.brings_browser

PROGRAM = Path(__file__).with_name("browser.mjs")
BODY = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True}
READY = {"type": "Ready", "status": "True", "reason": "Ready", "message": "1 of 1 pods are ready"}
DOWN = {"type": "Ready", "status": "False", "reason": "ImagePullFailed", "message": HOSTILE}


async def test_the_pages_work_in_a_browser(
    playground: ConsoleProcess,
    engine: EngineServer,
    gateway: GatewayProcess,
    crd: Api,
    cluster: Cluster,
    token: str,
) -> None:
    packages = await asyncio.to_thread(browser.provide)
    async with serving(engine, [gateway], crd, cluster.namespace) as service, aiohttp.ClientSession() as http:

        async def send() -> None:
            while True:
                async with http.post(f"{gateway.url}/{service}/v1/completions", json=BODY) as answer:
                    await answer.read()
                await asyncio.sleep(0.5)  # the browser needs the processor too

        await asyncio.to_thread(cluster.apply_service, "broken")
        await asyncio.to_thread(set_ready, cluster, "broken", DOWN, autoscaling={"message": HOSTILE})
        url = f"{gateway.url}/{service}/v1"
        told: dict[str, object] = {"readyReplicas": 1, "model": {"name": "tiny", "task": "Generate"}, "url": url}
        await asyncio.to_thread(set_ready, cluster, "tiny", READY, **told, desiredReplicas=1)
        sending = [asyncio.create_task(send()) for _ in range(6)]
        try:
            command = ["node", str(PROGRAM), playground.url, token, service, str(browser.PICTURES)]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            assert process.stdout is not None
            line = await asyncio.wait_for(process.stdout.readline(), 60)
            decision = {"message": "scaled 1 -> 2: inference_in_flight 6 / 3 -> 2", "reason": "Decided"}
            scaled = {**told, "desiredReplicas": 2, "autoscaling": decision}
            await asyncio.to_thread(set_ready, cluster, "tiny", READY, **scaled)
            _, errors = await asyncio.wait_for(process.communicate(), 150)
        finally:
            for task in sending:
                task.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    assert (line, process.returncode) == (b"watching\n", 0), errors.decode()
