"""Compares what the gateway adds to the latency with what another gateway adds, in the same run.

The other one is the gateway of an earlier commit, run from a checkout of it with the installed dependencies.

Both gateways, each in its own process, follow the same real API server and share one core. The load and an engine that
answers at once share another core. The engine alone and the two gateways get requests in alternating slices of a
second. Exits with 1 if the added P50 is more than 1.05 times that of the other gateway. The last line is one JSON
object.
"""

import argparse
import contextlib
import json
import os
import sys
from asyncio import Runner
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice, permutations
from statistics import median, quantiles
from typing import Any

import aiohttp
import uvloop
from tests.commits import PRESENT, Checkout, checked_out
from tests.gateway.cluster import own_address
from tests.gateway.process import GatewayProcess

from conveyor_bench.gateway.command import GATEWAY_CORE, LOAD_CORE, Load, measure_latency, pin, prepare, send
from conveyor_bench.processes import Child
from e2e.cluster.api import wait_until
from e2e.cluster.control_plane import ControlPlane

RATIO_BAR = 1.05
DIRECT, NOW, OTHER = "direct", "now", "other"


@dataclass
class Answers:
    """What was measured with one URL: the P50 of each slice in seconds, and the gateway's processor seconds."""

    p50: list[float] = field(default_factory=list)
    cpu_seconds: float = 0.0
    requests: int = 0


async def measure(
    urls: dict[str, str], gateways: dict[str, GatewayProcess], load: Load, rounds: int
) -> dict[str, Answers]:
    """Send requests to each URL for a slice, `rounds` times.

    Each order of the slices comes equally often, because a gateway is slower after a slice in which its core was idle.
    """
    answers = {name: Answers() for name in urls}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for url in urls.values():
            for _ in range(200):  # warm: connections, code
                await send(session, url)
        for number, order in enumerate(islice(cycle(permutations(urls)), rounds), start=1):
            for name in order:
                gateway = gateways.get(name)
                before = cpu_seconds(gateway)
                seconds = (await measure_latency(session, {name: urls[name]}, load))[name]
                answers[name].cpu_seconds += cpu_seconds(gateway) - before
                answers[name].requests += len(seconds)
                answers[name].p50.append(median(seconds))
            print(f"round {number} of {rounds}", end="\r", file=sys.stderr)
    return answers


def cpu_seconds(gateway: GatewayProcess | None) -> float:
    return gateway.metric("process_cpu_seconds_total") if gateway else 0.0


def knows_engine(gateway: GatewayProcess) -> bool:
    return gateway.metric("conveyor_gateway_engines", namespace="default", inference_service="qwen") == 1


def compare(answers: dict[str, Answers]) -> dict[str, Any]:
    """Return the added P50 of both gateways and their ratio, with the quartiles of the ratio in the rounds."""
    added = {
        name: [slowed - alone for slowed, alone in zip(answers[name].p50, answers[DIRECT].p50, strict=True)]
        for name in (NOW, OTHER)
    }
    ratios = [now / other for now, other in zip(added[NOW], added[OTHER], strict=True)]
    cpu = {name: answers[name].cpu_seconds / answers[name].requests * 1e6 for name in added}
    return {
        "rounds": len(ratios),
        "requests": answers[NOW].requests,
        "added_p50_ms": {name: median(values) * 1000 for name, values in added.items()},
        "added_p50_ratio": median(added[NOW]) / median(added[OTHER]),
        "ratio_quartiles": quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios,
        "cpu_microseconds": cpu,
        "cpu_ratio": cpu[NOW] / cpu[OTHER],
    }


def run(other: Checkout, load: Load, rounds: int) -> dict[str, Any]:
    """Compare with the gateway of the checkout `other`."""
    address = own_address()
    with contextlib.ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane())
        engine = stack.enter_context(Child("gateway.engine", address))
        port = int(engine.read_line())
        prepare(control_plane, address, port)
        gateways = {}
        for name, checkout in ((NOW, PRESENT), (OTHER, other)):
            with checkout.active():
                gateway = GatewayProcess(control_plane.kubeconfig)
                gateways[name] = stack.enter_context(gateway)
            wait_until("the engine", partial(knows_engine, gateway))
            pin(gateway.process.pid, GATEWAY_CORE)
        for pid in (engine.pid, os.getpid()):
            pin(pid, LOAD_CORE)
        urls = {DIRECT: f"http://{address}:{port}/v1/completions"}
        urls |= {name: f"{gateway.url}/default/qwen/v1/completions" for name, gateway in gateways.items()}
        with Runner(loop_factory=uvloop.new_event_loop) as runner:
            return compare(runner.run(measure(urls, gateways, load, rounds)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench gateway-beside", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", required=True, help="whose gateway runs beside the present one")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests-per-second", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a slice")
    options = parser.parse_args(argv)
    load = Load(options.requests_per_second, options.seconds, streams=0, events=0, events_per_second=0, concurrency=0)
    with checked_out(options.against) as other:
        result = run(other, load, options.rounds)
        name = f"at {other.name}"
    added, cpu = result["added_p50_ms"], result["cpu_microseconds"]
    print(f"added P50: {added[NOW]:.3f} ms, {name} {added[OTHER]:.3f} ms: {result['added_p50_ratio']:.3f} times")
    print(f"processor time of a request: {cpu[NOW]:.0f} and {cpu[OTHER]:.0f} us: {result['cpu_ratio']:.3f} times")
    met = result["added_p50_ratio"] <= RATIO_BAR
    print(json.dumps({"benchmark": "gateway-beside", "other": name, **result, "bars_met": {"added_p50": met}}))
    return 0 if met else 1
