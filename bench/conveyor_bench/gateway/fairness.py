"""Measures what chat clients get beside one client that floods the service with long requests.

First in virtual time (`virtual_fairness`). Then with one real gateway, a real engine with the demo model and a real API
server: the chats alone; beside the flood; beside so few long requests that places are always free, which no order of
the gateway can improve; and beside the flood while the gateway takes all clients for one, so that requests go in order
of arrival. Throughput is in tokens for each second of the engine's processor time. Exits with 1 if a bar is missed.
The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
from tests.engine.processes import REAL, EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_bench.gateway.virtual_fairness import FLOOD, Traffic, compare
from conveyor_bench.processes import cpu_seconds
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.demo_model import demo_model_directory

P95_BAR = 1.3
THROUGHPUT_BAR = 0.97
_CLIENT_HEADER = "X-Client"


@dataclass(slots=True)
class Outcome:
    first_token_seconds: list[float] = field(default_factory=list)  # of chats
    events: int = 0  # of all clients
    engine_seconds: float = 0.0  # processor time

    @property
    def p95(self) -> float:
        return percentile(self.first_token_seconds, 95)

    @property
    def events_per_engine_second(self) -> float:
        """Return the throughput of a busy engine, whatever else the processors do."""
        return self.events / self.engine_seconds


class Run:
    """One part of the measurement. engine_pid: of its process that computes. named: whether the gateway knows the
    clients."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, engine_pid: int, traffic: Traffic, *, named: bool = True
    ) -> None:
        self._http, self._url, self._traffic, self._named = http, url, traffic, named
        self._engine_pid = engine_pid
        self._random = random.Random(1)
        self._outcome = Outcome()
        self._counts_from = time.monotonic() + traffic.skipped_seconds
        self._end = time.monotonic() + traffic.seconds

    async def run(self, *, has_flood: bool) -> Outcome:
        traffic = self._traffic
        async with asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self._chat(f"chat-{number}")) for number in range(traffic.chats)]
            if has_flood:
                clients += [tasks.create_task(self._flood()) for _ in range(traffic.flood_requests)]
            await asyncio.sleep(traffic.skipped_seconds)
            used = cpu_seconds(self._engine_pid)
            await asyncio.sleep(traffic.seconds - traffic.skipped_seconds)
            self._outcome.engine_seconds = cpu_seconds(self._engine_pid) - used
            for client in clients:
                client.cancel()
        return self._outcome

    async def _chat(self, client: str) -> None:
        traffic = self._traffic
        while True:
            await asyncio.sleep(self._random.expovariate(1 / traffic.think_seconds))
            answer = self._random.randint(1, 2 * traffic.chat_answer)
            await self._send(client, traffic.chat_prompt, answer)

    async def _flood(self) -> None:
        await asyncio.sleep(2 * self._traffic.think_seconds)  # the others have sent requests
        while True:
            await self._send(FLOOD, self._traffic.flood_prompt, self._traffic.flood_answer)

    async def _send(self, client: str, prompt: int, answer: int) -> None:
        text = " ".join(self._random.choices(("red", "blue", "one", "two", "old", "new"), k=prompt))
        body = {"prompt": text, "max_tokens": answer, "ignore_eos": True, "stream": True}
        headers = {_CLIENT_HEADER: client} if self._named else {}
        began = time.monotonic()
        async with self._http.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {await response.text()}")
            is_first, last = True, b""
            async for piece in response.content.iter_any():
                now, events = time.monotonic(), piece.count(b"data: {")
                if now >= self._counts_from:
                    self._outcome.events += events
                    if events and is_first and client != FLOOD and began >= self._counts_from:
                        self._outcome.first_token_seconds.append(now - began)
                is_first, last = is_first and not events, (last + piece)[-20:]
        if not last.rstrip().endswith(b"[DONE]"):
            raise RuntimeError(f"a stream was cut: {last!r}")


async def measure(url: str, engine_pid: int, traffic: Traffic, rounds: int) -> dict[str, Any]:
    """Run the four parts in turns. Return the medians of the ratios."""
    p95s, floors, throughputs, seconds = [], [], [], list[dict[str, float]]()
    few = replace(traffic, flood_requests=traffic.batch_size * 2 // 3)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        for _ in range(rounds):
            alone = await Run(http, url, engine_pid, traffic).run(has_flood=False)
            fair = await Run(http, url, engine_pid, traffic).run(has_flood=True)
            free = await Run(http, url, engine_pid, few).run(has_flood=True)
            unfair = await Run(http, url, engine_pid, traffic, named=False).run(has_flood=True)
            floors.append(free.p95 / alone.p95)
            p95s.append(fair.p95 / alone.p95)
            throughputs.append(fair.events_per_engine_second / unfair.events_per_engine_second)
            seconds.append({"alone": alone.p95, "fair": fair.p95, "free": free.p95, "unfair": unfair.p95})
    return {
        "p95_seconds": seconds,
        "p95_ratio": sorted(p95s)[rounds // 2],
        "p95_ratio_with_free_places": sorted(floors)[rounds // 2],
        "throughput_ratio": sorted(throughputs)[rounds // 2],
        "throughput_ratios": throughputs,
    }


def run(traffic: Traffic, rounds: int) -> dict[str, Any]:
    """Start all programs, and measure."""
    with ControlPlane() as plane, tempfile.TemporaryDirectory() as name:
        api, folder = Api(plane.kubeconfig), Path(name)
        install_definitions(api)
        size = traffic.batch_size
        fields: dict[str, Any] = {"max_num_seqs": size, "num_kv_blocks": 8192, "host": "0.0.0.0"}
        with EngineServer(folder / "engine", demo_model_directory(), REAL, **fields) as engine:
            cluster = Cluster(api, "default")
            cluster.apply_service("demo", batching={"maxBatchSize": size}, queue={"timeout": "1h"})
            cluster.apply_engine("demo", own_address(), int(engine.wait_ready().url.rpartition(":")[2]))
            arguments = ("--trusted-proxies=127.0.0.0/8", f"--client-header={_CLIENT_HEADER}")
            with GatewayProcess(plane.kubeconfig, *arguments) as gateway:
                ready = {"namespace": "default", "inference_service": "demo"}
                wait_until("its engine", lambda: gateway.metric("conveyor_gateway_engines", **ready) == 1)
                url = f"{gateway.url}/default/demo/v1/completions"
                return asyncio.run(measure(url, engine.engine_pid, traffic, rounds))


def judge(result: dict[str, Any]) -> dict[str, bool]:
    """Return each bar and whether it is met."""
    return {
        "first token": result["p95_ratio"] <= P95_BAR,
        "throughput": result["throughput_ratio"] >= THROUGHPUT_BAR,
    }


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `fairness`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench fairness", description=__doc__)
    parser.add_argument("--virtual-only", action="store_true", help="leave out the real engine")
    parser.add_argument("--virtual-seconds", type=float, default=300.0)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each part with the real engine")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of the real engine")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {
        "virtual": compare(Traffic(seconds=options.virtual_seconds, skipped_seconds=options.virtual_seconds / 5))
    }
    if not options.virtual_only:
        real = Traffic(
            options.batch_size,
            chat_prompt=60,
            chat_answer=30,
            think_seconds=2.0,
            flood_requests=3 * options.batch_size,
            flood_prompt=120,
            flood_answer=400,
            seconds=options.seconds,
            skipped_seconds=options.seconds / 4,
        )
        results["real"] = {**asdict(real), **run(real, options.rounds)}
    bars = {name: judge(result) for name, result in results.items()}
    print(json.dumps({"benchmark": "fairness", **results, "bars_met": bars, "load_average": os.getloadavg()}))
    return 0 if all(all(each.values()) for each in bars.values()) else 1
