"""Sends thousands of requests of all classes and kinds through a real gateway to an engine that computes nothing.

Each one ends, in the way of its kind. Afterwards nothing is held, and memory is what it was before.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.contract.serving import add_engine
from tests.engine.chat_model import CONTEXT_TOKENS, write_chat_model
from tests.engine.processes import IDLE, EngineServer, children, wait_until
from tests.gateway.cluster import Cluster
from tests.gateway.process import GatewayProcess

from conveyor_protocol.request_headers import CLASS_HEADER, REQUEST_TIMEOUT_HEADER
from e2e.cluster.api import Api

CLIENTS = 100
LONGEST_SECONDS = 120.0  # a request without an end
GROWTH_BYTES_MAX = 24 << 20  # of all processes together, in the second half of the requests
CLASSES = [
    {"name": "urgent", "level": 0},
    {"name": "normal", "level": 10},
    {"name": "bulk", "level": 20, "maxRequests": 40, "maxShare": 50},
]
ASKED: dict[str, Any] = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request, and the status with which it ends; 0: its client disconnects."""

    name: str
    status: int
    body: dict[str, Any] = field(default_factory=dict)
    raw: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    leaves: bool = False  # the client, after the first bytes


KINDS = (
    Kind("whole", 200),
    Kind("stream", 200, {"stream": True}),
    Kind("choices", 200, {"n": 3, "stream": True}),
    Kind("chat", 200, {"messages": [{"role": "user", "content": "hello"}], "prompt": None}),
    Kind("long prompt", 200, {"prompt": "x" * 2_000}),
    Kind("too long", 400, {"prompt": "x" * (CONTEXT_TOKENS + 1)}),
    Kind("no number", 400, {"max_tokens": "many"}),
    Kind("no JSON", 400, raw=b'{"prompt": "hel'),
    Kind("no class", 400, headers={CLASS_HEADER: "nobody"}),
    Kind("short of time", 504, {"max_tokens": 6_000, "stream": False}, headers={REQUEST_TIMEOUT_HEADER: "0.2"}),
    Kind("left stream", 0, {"stream": True, "max_tokens": 6_000}, leaves=True),
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    """An engine that preempts, because it has too few blocks for its rows."""
    model = write_chat_model(tmp_path_factory.mktemp("models") / "tiny")
    limits = {"max_num_seqs": 32, "num_kv_blocks": 1_600}
    with EngineServer(tmp_path_factory.mktemp("engine"), model, IDLE, host="0.0.0.0", **limits) as started:
        yield started.wait_ready()


async def send_request(http: aiohttp.ClientSession, url: str, kind: Kind, number: int) -> int:
    """Send a request. Returns the status of the complete answer; 0 if the client disconnected."""
    fields = {name: value for name, value in (ASKED | kind.body).items() if value is not None}
    path = "chat/completions" if "messages" in fields else "completions"
    headers = {CLASS_HEADER: CLASSES[number % len(CLASSES)]["name"]} | kind.headers
    data = kind.raw or json.dumps(fields).encode()
    async with http.post(f"{url}/v1/{path}", data=data, headers=headers) as answer:
        if kind.leaves and answer.status == 200:
            assert await answer.content.readany()
            answer.close()
            return 0
        body = await answer.read()
    if answer.status != 200:
        assert json.loads(body)["error"]["message"]
        assert answer.status not in (429, 503) or int(answer.headers["Retry-After"]) >= 1
    elif fields.get("stream"):
        assert body.rstrip().endswith(b"data: [DONE]")
    else:
        assert json.loads(body)["usage"]["completion_tokens"] == fields["max_tokens"]
    return answer.status


async def send(url: str, numbers: range) -> Counter[tuple[str, int]]:
    """Send a request for each number, from this many clients at once."""
    remaining, ended = iter(numbers), Counter[tuple[str, int]]()

    async def be_a_client(http: aiohttp.ClientSession) -> None:
        for number in remaining:
            kind = KINDS[number % len(KINDS)]
            async with asyncio.timeout(LONGEST_SECONDS):
                ended[kind.name, await send_request(http, url, kind, number)] += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as clients:
        for _ in range(CLIENTS):
            clients.create_task(be_a_client(http))
    return ended


def measure_memory(*pids: int) -> int:
    """Return the private memory of these processes and their descendants, in bytes."""
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        total += sum(
            int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty", "Private_Clean"))
        )
        total += measure_memory(*children(pid))
    return total


@pytest.mark.parametrize(
    "num_requests",
    [pytest.param(2_000, marks=pytest.mark.slow), pytest.param(10_000, marks=pytest.mark.nightly)],
)
async def test_every_request_ends_and_nothing_is_held_afterwards(
    num_requests: int, engine: EngineServer, crd: Api, kubeconfig: Path, namespace: str
) -> None:
    cluster = Cluster(crd, namespace)
    queue = {"maxRequests": 200, "defaultClass": "normal", "maxClass": "urgent", "classes": CLASSES}
    await asyncio.to_thread(cluster.apply_service, "tiny", batching={"maxBatchSize": 32}, queue=queue)
    await add_engine(engine, cluster)
    with GatewayProcess(kubeconfig) as gateway:
        labels = {"namespace": namespace, "inference_service": "tiny"}
        wait_until(lambda: gateway.metric("conveyor_gateway_engines", **labels), "its engine")
        url = f"{gateway.url}/{namespace}/tiny"
        ended = await send(url, range(num_requests // 2))
        engine.wait_load(running=0, waiting=0)
        before = measure_memory(gateway.process.pid, engine.process.pid)
        ended += await send(url, range(num_requests // 2, num_requests))

        assert ended.total() == num_requests
        expected = {kind.name: kind.status for kind in KINDS}
        # The queue of a class may be full, which is found out before the body is read by the engine.
        assert not {end: count for end, count in ended.items() if end[1] not in (expected[end[0]], 429)}
        assert all(ended[end] for end in expected.items()), ended
        engine.wait_load(running=0, waiting=0, kv_cache_usage=0.0)
        demand = gateway.demand(f"{namespace}/tiny")
        assert demand is not None
        assert (demand["queued"], demand["in_flight"]) == (0, 0)
        assert gateway.metric("conveyor_gateway_held_body_bytes") == 0
        assert measure_memory(gateway.process.pid, engine.process.pid) - before < GROWTH_BYTES_MAX
