"""An engine that is killed while it answers, behind a real gateway: no answer is lost, and none comes twice."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.serving import add_engine, serving
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

pytestmark = pytest.mark.slow
NUM_REQUESTS = 12
BODY = {"prompt": "hello", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[EngineServer]]:
    model = write_chat_model(tmp_path / "tiny")
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                EngineServer(tmp_path / str(number), model, IDLE, host="0.0.0.0", max_num_seqs=4, num_kv_blocks=8192)
            )
            for number in range(2)
        ]
        yield [engine.wait_ready() for engine in started]


def judge(body: bytes, is_stream: bool) -> str:
    """How an answer of status 200 ended; it ends once."""
    if not is_stream:
        assert json.loads(body)["usage"]["completion_tokens"] == 400
        return "whole"
    ends = [event for event in body.split(b"\n\n") if event == b"data: [DONE]" or event.startswith(b'data: {"error"')]
    assert len(ends) == 1
    assert body.rstrip().endswith(ends[0])
    return "whole" if ends[0] == b"data: [DONE]" else "error"


@pytest.mark.parametrize("victim", ["engine process", "server"])
async def test_every_request_of_a_killed_engine_ends_in_one_answer(
    engines: list[EngineServer], gateway: GatewayProcess, crd: Api, namespace: str, victim: str
) -> None:
    killed, other = engines
    begun = asyncio.Event()

    async def ask(http: aiohttp.ClientSession, service: str, number: int) -> str:
        fields: dict[str, Any] = BODY | {"stream": number % 2 == 0}
        headers = {"X-Request-Id": f"{namespace}-{number}"}
        url = f"{gateway.url}/{service}/v1/completions"
        async with http.post(url, json=fields, headers=headers) as answer:
            body = await answer.content.readany()
            begun.set()
            body += await answer.content.read()
        return judge(body, fields["stream"]) if answer.status == 200 else f"{answer.status}"

    async with serving(killed, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
        asking = [asyncio.create_task(ask(http, service, number)) for number in range(NUM_REQUESTS)]
        await begun.wait()
        await add_engine(other, Cluster(crd, namespace))
        os.kill(killed.engine_pid if victim == "engine process" else killed.process.pid, signal.SIGKILL)
        ended = await asyncio.gather(*asking)
        demand = await asyncio.to_thread(gateway.demand, service)

    assert set(ended) <= {"whole", "error", "502"}
    assert "whole" in ended
    assert demand is not None
    assert demand["in_flight"] == 0
    lines = [line for line in gateway.log if f" event=request id={namespace}-" in line]
    assert len(lines) == NUM_REQUESTS
