"""Measures the processor time that traces cost a gateway and the API process of an engine.

Two gateways and two engines, each in its own process, follow the same real API server. One of each exports its spans to
a collector, and the others export none. The engines are real, except for their models, which compute nothing. Short
requests go to both pairs in alternating slices. The processor time is that of a whole round, because spans of a slice
may be exported after it. The collector and the load use another core. The last line is one JSON object.
"""

import argparse
import asyncio
import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import aiohttp
import uvloop
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess
from tests.process.collector import Collector

from conveyor_bench.gateway.beside import compare_cpu
from conveyor_bench.gateway.command import GATEWAY_CORE, LOAD_CORE, pin
from conveyor_bench.processes import cpu_seconds
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

ON, OFF = "on", "off"
BODY = {"prompt": "x" * 100, "max_tokens": 16, "ignore_eos": True}


async def send(session: aiohttp.ClientSession, url: str, requests_per_second: int, seconds: float) -> int:
    """Send requests at a rate, whether or not answers have arrived. Returns how many were sent."""

    async def post() -> None:
        async with session.post(url, json=BODY) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{url} answered {answer.status}: {await answer.text()}")
            await answer.read()

    loop = asyncio.get_running_loop()
    begin, tasks = loop.time(), []
    for number in range(max(1, int(requests_per_second * seconds))):
        await asyncio.sleep(max(0.0, begin + number / requests_per_second - loop.time()))
        tasks.append(asyncio.create_task(post()))
    await asyncio.gather(*tasks)
    return len(tasks)


async def measure(
    urls: dict[str, str], pids: dict[str, dict[str, int]], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return the processor seconds for a request in each round, by program and then by ON and OFF."""
    used: dict[str, dict[str, list[float]]] = {program: {ON: [], OFF: []} for program in pids}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for number in range(-1, options.rounds):  # the first round warms up
            before = {(program, kind): cpu_seconds(pids[program][kind]) for program in pids for kind in urls}
            for kind in sorted(urls, reverse=bool(number % 2)):
                sent = await send(session, urls[kind], options.requests_per_second, options.seconds)
            for program, kind in before:
                if number >= 0:
                    used[program][kind].append((cpu_seconds(pids[program][kind]) - before[program, kind]) / sent)
    return used


def run(options: argparse.Namespace) -> dict[str, Any]:
    address = own_address()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        control_plane = stack.enter_context(ControlPlane())
        collector = stack.enter_context(Collector())
        api, model = Api(control_plane.kubeconfig), write_chat_model(folder / "model")
        install_definitions(api)
        cluster = Cluster(api, "default")
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": str(options.ratio),
        }
        urls: dict[str, str] = {}
        pids: dict[str, dict[str, int]] = {"gateway": {}, "engine": {}}
        for kind in (ON, OFF):
            with mock.patch.dict(os.environ, environment if kind == ON else {}):
                engine = stack.enter_context(EngineServer(folder / kind, model, IDLE, host="0.0.0.0"))
                gateway = stack.enter_context(GatewayProcess(control_plane.kubeconfig))
            engine.wait_ready()
            cluster.apply_service(kind)
            cluster.apply_engine(kind, address, int(engine.url.rpartition(":")[2]))
            labels = {"namespace": "default", "inference_service": kind}
            wait_until("the engine", partial(gateway.metric, "conveyor_gateway_engines", **labels))
            urls[kind] = f"{gateway.url}/default/{kind}/v1/completions"
            pids["gateway"][kind], pids["engine"][kind] = gateway.process.pid, engine.process.pid
            for pid in (gateway.process.pid, engine.process.pid):
                pin(pid, GATEWAY_CORE)
        pin(os.getpid(), LOAD_CORE)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            used = runner.run(measure(urls, pids, options))
        if not collector.spans:
            raise RuntimeError("no span was exported")
    return {program: compare_cpu(by_kind[ON], by_kind[OFF]) for program, by_kind in used.items()}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench traces", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests-per-second", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a slice")
    parser.add_argument("--ratio", type=float, default=1.0, help="the part of the requests that have a trace")
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    result = run(options)
    for program, figures in result.items():
        cpu, (low, _, high) = figures["cpu_microseconds"], figures["quartiles"]
        print(
            f"processor time of a request, {program}: {cpu['now']:.0f} us with traces, {cpu['other']:.0f} us without: "
            f"{figures['ratio']:.3f} times (quartiles {low:.3f} and {high:.3f}); load average {os.getloadavg()[0]:.1f}"
        )
    print(json.dumps({"benchmark": "traces", "rounds": options.rounds, "ratio": options.ratio, **result}))
    return 0
