"""Kills or stops an engine that answers through a real gateway. No answer is lost, counted twice or sent twice."""

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
from tests.engine.processes import IDLE, EngineServer, wait_until
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api

pytestmark = pytest.mark.slow
NUM_REQUESTS = 12
PROMPT_TOKENS = 4
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


def judge(body: bytes, is_stream: bool) -> tuple[str, int]:
    """Return how an answer with status 200 ended, and its tokens, each of which is a character.

    Checks that it ends once.
    """
    if not is_stream:
        assert json.loads(body)["usage"]["completion_tokens"] == 400
        return "whole", 400
    ends = [event for event in body.split(b"\n\n") if event == b"data: [DONE]" or event.startswith(b'data: {"error"')]
    assert len(ends) == 1
    assert body.rstrip().endswith(ends[0])
    chunks = [json.loads(event[6:]) for event in body.split(b"\n\n") if event.startswith(b'data: {"id"')]
    num_tokens = sum(len(choice["text"]) for chunk in chunks for choice in chunk["choices"])
    return "whole" if ends[0] == b"data: [DONE]" else "error", num_tokens


def counted(gateway: GatewayProcess, namespace: str) -> dict[str, float]:
    """Return the gateway's counters of the service."""
    labels = {"namespace": namespace, "inference_service": "tiny"}
    names = ("prompt_tokens", "generation_tokens", "uncounted_requests")
    found = {name: gateway.metric(f"conveyor_gateway_{name}_total", **labels) for name in names}
    for code in ("200", "502"):
        found[code] = gateway.metric("conveyor_gateway_requests_total", code=code, **labels)
    broke = {"reason": "engine_broke", **labels}
    return found | {"engine_broke": gateway.metric("conveyor_gateway_dropped_requests_total", **broke)}


def end(engine: EngineServer, how: str) -> None:
    """Kill the server or the engine process; or stop the latter until the probe fails, and then end the server."""
    if how != "the engine process hangs":
        os.kill(engine.engine_pid if how == "the engine process is killed" else engine.process.pid, signal.SIGKILL)
        return
    os.kill(engine.engine_pid, signal.SIGSTOP)
    wait_until(lambda: engine.get("/livez").status_code == 503, "stuck", engine)
    engine.terminate()
    engine.wait_exit()


@pytest.mark.parametrize("how", ["the engine process is killed", "the server is killed", "the engine process hangs"])
async def test_every_request_of_a_killed_engine_ends_in_one_answer(
    engines: list[EngineServer], gateway: GatewayProcess, crd: Api, namespace: str, how: str
) -> None:
    killed, other = engines
    begun = asyncio.Event()

    async def send(http: aiohttp.ClientSession, service: str, number: int) -> tuple[str, int]:
        fields: dict[str, Any] = BODY | {"stream": number % 2 == 0}
        headers = {"X-Request-Id": f"{namespace}-{number}"}
        url = f"{gateway.url}/{service}/v1/completions"
        async with http.post(url, json=fields, headers=headers) as answer:
            body = await answer.content.readany()
            begun.set()
            body += await answer.content.read()
        return judge(body, fields["stream"]) if answer.status == 200 else (f"{answer.status}", 0)

    async with serving(killed, [gateway], crd, namespace) as service, aiohttp.ClientSession() as http:
        requests = [asyncio.create_task(send(http, service, number)) for number in range(NUM_REQUESTS)]
        await begun.wait()
        await add_engine(other, Cluster(crd, namespace))
        await asyncio.to_thread(end, killed, how)
        answers = await asyncio.gather(*requests)
        demand = await asyncio.to_thread(gateway.demand, service)
        count = await asyncio.to_thread(counted, gateway, namespace)

    ended = [how for how, _ in answers]
    assert set(ended) <= {"whole", "error", "502"}
    assert "whole" in ended
    assert demand is not None
    assert demand["in_flight"] == 0
    lines = [line for line in gateway.log if f" event=request id={namespace}-" in line]
    assert len(lines) == NUM_REQUESTS
    assert count["502"] == ended.count("502")
    assert count["200"] == NUM_REQUESTS - ended.count("502")
    assert count["prompt_tokens"] == PROMPT_TOKENS * (NUM_REQUESTS - count["uncounted_requests"])
    assert count["uncounted_requests"] <= len(ended) - ended.count("whole")
    seen = sum(tokens for _, tokens in answers)
    # Of a stream that broke, the tokens of its engine's last report count.
    assert 400 * ended.count("whole") <= count["generation_tokens"] <= seen
    if (
        how == "the server is killed"
    ):  # nobody is left to end the streams, or to report that the engine process has died
        assert count["engine_broke"] == len(ended) - ended.count("whole")
