"""Compares the processor time of the gateway with that of another gateway, in the same run.

The other one is the gateway of an earlier commit, run from a checkout of it with the installed dependencies.

Both gateways, each in its own process, follow the same real API server and share one core. The load and an engine that
answers at once share another core. The engine alone and the two gateways get requests and then streams in alternating
slices. Exits with 1 if a request or an event of a stream takes more than 1.05 times the processor time of the other
gateway: the median of the rounds, because other load slows single slices. The added P50 is printed too. It has no bar,
because beside other load it is the time that a gateway waits for its core. The last line is one JSON object.
"""

import argparse
import contextlib
import json
import os
import sys
from asyncio import Runner
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, islice, permutations
from statistics import median, quantiles
from typing import Any

import aiohttp
import uvloop
from tests.commits import PRESENT, Checkout, checked_out
from tests.gateway.cluster import own_address
from tests.gateway.keys import make_api_key, make_key
from tests.gateway.process import GatewayProcess

from conveyor_api import names
from conveyor_bench.gateway.command import (
    GATEWAY_CORE,
    LOAD_CORE,
    Load,
    measure_latency,
    measure_streams,
    pin,
    prepare,
    send,
)
from conveyor_bench.processes import Child, cpu_seconds
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane

RATIO_BAR = 1.05
DIRECT, NOW, OTHER = "direct", "now", "other"


@dataclass
class Answers:
    """What was measured with one URL in each slice, in seconds."""

    p50: list[float] = field(default_factory=list)
    cpu_of_request: list[float] = field(default_factory=list)  # of the gateway
    cpu_of_event: list[float] = field(default_factory=list)  # the same, with an event's share of its stream


async def measure(
    urls: dict[str, str], gateways: dict[str, GatewayProcess], load: Load, rounds: int, headers: dict[str, str]
) -> dict[str, Answers]:
    """Send requests and streams to each URL for a slice, `rounds` times. headers: of requests to the present gateway.

    Each order of the slices comes equally often, because a gateway is slower after a slice in which its core was idle.
    """
    answers = {name: Answers() for name in urls}
    async with contextlib.AsyncExitStack() as stack:
        sessions = {}
        for name, url in urls.items():
            connector, own = aiohttp.TCPConnector(limit=0), headers if name == NOW else {}
            session = sessions[name] = aiohttp.ClientSession(connector=connector, headers=own)
            await stack.enter_async_context(session)
            for _ in range(200):  # warm: connections, code
                await send(session, url)
        for number, order in enumerate(islice(cycle(permutations(urls)), rounds), start=1):
            for name in order:
                await measure_slice(sessions[name], urls[name], gateways.get(name), load, answers[name])
            print(f"round {number} of {rounds}", end="\r", file=sys.stderr)
    return answers


async def measure_slice(
    session: aiohttp.ClientSession, url: str, gateway: GatewayProcess | None, load: Load, answers: Answers
) -> None:
    pid = gateway.process.pid if gateway else os.getpid()
    before = cpu_seconds(pid)
    seconds = (await measure_latency(session, {"": url}, load))[""]
    answers.p50.append(median(seconds))
    answers.cpu_of_request.append((cpu_seconds(pid) - before) / len(seconds))
    if gateway:
        before = cpu_seconds(pid)
        streams = await measure_streams(session, url, load)
        if streams["lost"]:
            raise RuntimeError(f"{streams['lost']} streams were lost")
        answers.cpu_of_event.append((cpu_seconds(pid) - before) / (load.streams * load.events))


def knows_engine(gateway: GatewayProcess) -> bool:
    return gateway.metric("conveyor_gateway_engines", namespace="default", inference_service="qwen") == 1


def create_keys(control_plane: ControlPlane, number: int) -> dict[str, str]:
    """Create this many APIKeys. Returns the header with the key of the last one; nothing without keys."""
    api = Api(control_plane.kubeconfig)
    path = f"/apis/{names.GROUP}/{names.VERSION}/namespaces/default/{names.API_KEY_PLURAL}"
    keys = [make_key("default", each) for each in range(number)]
    with ThreadPoolExecutor(8) as pool:
        bodies = (make_api_key("default", f"key-{each}", key) for each, key in enumerate(keys))
        list(pool.map(partial(api.create, path), bodies))
    return {"Authorization": f"Bearer {keys[-1]}"} if keys else {}


def compare(answers: dict[str, Answers]) -> dict[str, Any]:
    """Return the figures of both gateways and their ratios: medians of the rounds, and quartiles."""
    now, other, direct = (answers[name] for name in (NOW, OTHER, DIRECT))
    added = {
        name: [slowed - alone for slowed, alone in zip(one.p50, direct.p50, strict=True)]
        for name, one in ((NOW, now), (OTHER, other))
    }
    return {
        "rounds": len(direct.p50),
        "added_p50_ms": {name: median(values) * 1e3 for name, values in added.items()},
        "request": compare_cpu(now.cpu_of_request, other.cpu_of_request),
        "event": compare_cpu(now.cpu_of_event, other.cpu_of_event),
    }


def compare_cpu(now: list[float], other: list[float]) -> dict[str, Any]:
    ratios = [one / another for one, another in zip(now, other, strict=True)]
    return {
        "cpu_microseconds": {NOW: median(now) * 1e6, OTHER: median(other) * 1e6},
        "ratio": median(ratios),
        "quartiles": quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios,
    }


def run(other: Checkout, load: Load, rounds: int, num_keys: int) -> dict[str, Any]:
    """Compare with the gateway of the checkout `other`."""
    address = own_address()
    with contextlib.ExitStack() as stack:
        control_plane = stack.enter_context(ControlPlane())
        engine = stack.enter_context(Child("gateway.engine", address))
        port = int(engine.read_line())
        prepare(control_plane, address, port)
        headers = create_keys(control_plane, num_keys)
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
            return compare(runner.run(measure(urls, gateways, load, rounds, headers)))


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench gateway-beside", description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", required=True, help="whose gateway runs beside the present one")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests-per-second", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a slice's requests")
    parser.add_argument(
        "--keys",
        type=int,
        default=0,
        help="APIKeys in the cluster; requests to the present gateway then have one of them",
    )
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error("--rounds must be at least 2")
    load = Load(
        options.requests_per_second, options.seconds, streams=10, events=50, events_per_second=50, concurrency=0
    )
    with checked_out(options.against) as other:
        result = run(other, load, options.rounds, options.keys)
        name = f"at {other.name}"
    added = result["added_p50_ms"]
    print(f"added P50: {added[NOW]:.3f} ms, {name} {added[OTHER]:.3f} ms; load average {os.getloadavg()}")
    for work in ("request", "event"):
        cpu, (low, _, high) = result[work]["cpu_microseconds"], result[work]["quartiles"]
        print(
            f"processor time of a {work}: {cpu[NOW]:.0f} and {cpu[OTHER]:.0f} us: {result[work]['ratio']:.3f} times "
            f"(quartiles {low:.3f} and {high:.3f})"
        )
    bars = {work: result[work]["ratio"] <= RATIO_BAR for work in ("request", "event")}
    print(json.dumps({"benchmark": "gateway-beside", "other": name, **result, "bars_met": bars}))
    return 0 if all(bars.values()) else 1
