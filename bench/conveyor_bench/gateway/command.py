"""Measures the gateway: added latency at a fixed rate, 500 streams at once, and maximum of short requests per second.

One real gateway process, pinned to one core, follows a real API server (the control plane of the tests). An engine
that answers at once, and the load, share another core. Every measurement is made twice in the same run, alternating:
directly to the engine, and through the gateway. The difference is what the gateway adds. Exits with 1 if a bar is
missed (p50 added latency at most 3 ms, no stream lost). The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import uvloop
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_bench.gateway.engine import ANSWER, event
from conveyor_bench.processes import Child
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

GATEWAY_CORE, LOAD_CORE = 0, 1
ADDED_LATENCY_BAR_MS = 3.0
PROMPT = json.dumps({"model": "qwen", "prompt": "x" * 400, "max_tokens": 16}).encode()


@dataclass(frozen=True, slots=True)
class Load:
    """The sizes of the measurements."""

    requests_per_second: int
    seconds: float
    streams: int
    events: int  # per stream
    events_per_second: float  # per stream
    concurrency: int  # of the short requests


# The load


async def send(session: aiohttp.ClientSession, url: str) -> float:
    """Return the seconds until the whole answer has arrived. Raises RuntimeError if the answer is wrong."""
    began = time.perf_counter()
    async with session.post(url, data=PROMPT) as answer:
        body = await answer.read()
    if answer.status != 200 or body != ANSWER:
        raise RuntimeError(f"{url} answered {answer.status}: {body[:200]!r}")
    return time.perf_counter() - began


async def measure_latency(session: aiohttp.ClientSession, urls: dict[str, str], load: Load) -> dict[str, list[float]]:
    """Measure in an open loop: each URL gets `requests_per_second`, in turns, whether or not answers have arrived."""
    loop = asyncio.get_running_loop()
    tasks: dict[str, list[asyncio.Task[float]]] = {name: [] for name in urls}
    begin = loop.time()
    for number in range(int(load.requests_per_second * load.seconds)):
        for turn, (name, url) in enumerate(urls.items()):
            due = begin + (number + turn / len(urls)) / load.requests_per_second
            await asyncio.sleep(max(0.0, due - loop.time()))
            tasks[name].append(asyncio.create_task(send(session, url)))
    return {name: await asyncio.gather(*group) for name, group in tasks.items()}


async def measure_streams(session: aiohttp.ClientSession, url: str, load: Load) -> dict[str, float]:
    """Measure all streams at once. A stream is lost unless all its bytes arrive."""
    expected = b"".join(event(number) for number in range(load.events))
    body = json.dumps({"events": load.events, "rate": load.events_per_second}).encode()
    first_seconds: list[float] = []

    async def follow() -> bool:
        began = time.perf_counter()
        async with session.post(url, data=body) as answer:
            received = bytearray(await answer.content.readany())
            first_seconds.append(time.perf_counter() - began)
            async for piece in answer.content.iter_any():
                received += piece
        return bytes(received) == expected

    began = time.perf_counter()
    arrived = await asyncio.gather(*(follow() for _ in range(load.streams)), return_exceptions=True)
    seconds = time.perf_counter() - began
    return {
        "lost": sum(result is not True for result in arrived),
        "seconds": seconds,
        "events_per_second": load.streams * load.events / seconds,
        "first_event_p50_ms": percentile(first_seconds, 50) * 1000,
    }


async def measure_throughput(session: aiohttp.ClientSession, url: str, load: Load) -> float:
    """Measure in a closed loop: short requests per second, with `concurrency` requests at a time."""
    end = time.perf_counter() + load.seconds / 4
    done = 0

    async def keep_sending() -> None:
        nonlocal done
        while time.perf_counter() < end:
            await send(session, url)
            done += 1

    began = time.perf_counter()
    await asyncio.gather(*(keep_sending() for _ in range(load.concurrency)))
    return done / (time.perf_counter() - began)


async def measure(urls: dict[str, str], load: Load, cpu_seconds: Callable[[], Awaitable[float]]) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=300)) as session:
        for url in urls.values():
            await asyncio.gather(*(send(session, url) for _ in range(50)))  # warm: connections, code
        before = await cpu_seconds()
        latencies = await measure_latency(session, urls, load)
        latency_cpu = (await cpu_seconds() - before) / load.seconds
        streams, throughput = {}, {}
        for name, url in urls.items():
            before = await cpu_seconds()
            streams[name] = await measure_streams(session, url, load)
            streams[name]["gateway_cpu_share"] = (await cpu_seconds() - before) / streams[name]["seconds"]
            throughput[name] = await measure_throughput(session, url, load)
    milliseconds = {
        name: {f"p{percent}": percentile(seconds, percent) * 1000 for percent in (50, 95, 99)}
        for name, seconds in latencies.items()
    }
    return {
        "requests_per_second": load.requests_per_second,
        "requests": len(latencies["gateway"]),
        "latency_ms": milliseconds,
        "added_latency_ms": {
            percent: milliseconds["gateway"][percent] - milliseconds["direct"][percent]
            for percent in milliseconds["gateway"]
        },
        "gateway_cpu_share": latency_cpu,
        "num_streams": load.streams,
        "streams": streams,
        "short_requests_per_second": throughput,
    }


# The set-up


def pin(pid: int, core: int) -> None:
    """Pin all threads of `pid` to one core. Does nothing if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {cores[core % len(cores)]})


def prepare(control_plane: ControlPlane, address: str, port: int) -> None:
    """Create the service `default/qwen` with one engine."""
    api = Api(control_plane.kubeconfig)
    install_definitions(api)
    cluster = Cluster(api, "default")
    cluster.apply_service("qwen", batching={"maxBatchSize": 1024}, queue={"maxRequests": 10_000})
    cluster.complete_rollout("qwen")  # gateways from before ADR 156 cannot read the generation -1 of the CRD's default
    cluster.apply_engine("qwen", address, port)


def run(load: Load) -> dict[str, Any]:
    address = own_address()
    with ControlPlane() as control_plane, Child("gateway.engine", address) as engine:
        port = int(engine.read_line())
        prepare(control_plane, address, port)
        with GatewayProcess(control_plane.kubeconfig) as gateway:
            ready = {"namespace": "default", "inference_service": "qwen"}
            wait_until("the engine", lambda: gateway.metric("conveyor_gateway_engines", **ready) == 1)
            for pid, core in ((gateway.process.pid, GATEWAY_CORE), (engine.pid, LOAD_CORE), (os.getpid(), LOAD_CORE)):
                pin(pid, core)
            urls = {
                "direct": f"http://{address}:{port}/v1/completions",
                "gateway": f"{gateway.url}/default/qwen/v1/completions",
            }

            async def cpu_seconds() -> float:
                return await asyncio.to_thread(gateway.metric, "process_cpu_seconds_total")

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                result = runner.run(measure(urls, load, cpu_seconds))
            result["gateway_resident_mib"] = gateway.metric("process_resident_memory_bytes") / 2**20
    return result


def report(result: dict[str, Any]) -> None:
    print(
        f"{result['requests']} requests each way at {result['requests_per_second']}/s, load average {os.getloadavg()}"
    )
    print(f"{'':10} {'p50 ms':>8} {'p95 ms':>8} {'p99 ms':>8} {'lost of':>8} {'events/s':>9} {'short req/s':>12}")
    for name in ("direct", "gateway"):
        latency, streams = result["latency_ms"][name], result["streams"][name]
        columns = " ".join(f"{latency[percent]:8.3f}" for percent in ("p50", "p95", "p99"))
        lost = f"{streams['lost']}/{result['num_streams']}"
        throughput = result["short_requests_per_second"][name]
        print(f"{name:10} {columns} {lost:>8} {streams['events_per_second']:9.0f} {throughput:12.0f}")
    added = " ".join(f"{result['added_latency_ms'][percent]:8.3f}" for percent in ("p50", "p95", "p99"))
    print(f"{'added':10} {added}")
    print(
        f"the gateway's core: {result['gateway_cpu_share']:.0%} busy with the requests at that rate, "
        f"{result['streams']['gateway']['gateway_cpu_share']:.0%} with the streams; "
        f"{result['gateway_resident_mib']:.0f} MiB resident"
    )


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench gateway", description=__doc__)
    parser.add_argument("--requests-per-second", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0, help="of the latency measurement")
    parser.add_argument("--streams", type=int, default=500)
    parser.add_argument("--events", type=int, default=100, help="per stream")
    parser.add_argument("--events-per-second", type=float, default=10.0, help="per stream")
    parser.add_argument("--concurrency", type=int, default=32, help="of the short requests")
    result = run(Load(**vars(parser.parse_args(argv))))
    report(result)
    bars = {
        "added_latency_p50": result["added_latency_ms"]["p50"] <= ADDED_LATENCY_BAR_MS,
        "no_stream_lost": result["streams"]["gateway"]["lost"] == 0,
    }
    print(json.dumps({"benchmark": "gateway", **result, "bars_met": bars}))
    return 0 if all(bars.values()) else 1
