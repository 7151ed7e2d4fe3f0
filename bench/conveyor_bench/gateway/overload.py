"""Measures ten times the possible load: answers per second, rejections, and the latency of the most urgent class.

Runs one real gateway, one real engine whose model computes nothing, and a real API server. First, closed-loop clients
keep the engine full, once with the low class and once with the most urgent one. Then requests arrive at a fixed rate:
at the measured capacity and at ten times the capacity, one in forty of the most urgent class. Exits with 1 if a bar is
missed. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
from tests.engine.chat_model import write_chat_model
from tests.engine.processes import IDLE, EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_load.percentiles import percentile
from conveyor_protocol.request_headers import CLASS_HEADER
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

BEST, LOW = "best", "low"
ONE_OF = 40  # one request in this many is of the most urgent class
OVERLOAD = 10
CLASSES = [{"name": BEST, "level": 0}, {"name": LOW, "level": 10}]
GOODPUT_BAR = 0.9  # least answers at ten times the load, as a share of those at capacity
WAIT_BAR = 2.0  # for the most urgent class: p99 of the first token, divided by the time of a whole answer
TOKEN_BAR = 1.2  # for the most urgent class: time between tokens, divided by the same time without other classes


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the measurement."""

    seconds: float  # of each part
    rows: int
    tokens: int  # of an answer


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a request. Seconds count from when it was sent."""

    request_class: str
    status: int
    first_seconds: float
    seconds: float
    retry_after: str | None


async def send(http: aiohttp.ClientSession, url: str, request_class: str, tokens: int) -> Outcome:
    """Send a request and read its stream to the end. Raises RuntimeError if the stream was cut."""
    body = json.dumps({"prompt": "x" * 32, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    began = time.monotonic()
    async with http.post(url, data=body, headers={CLASS_HEADER: request_class}) as answer:
        received = bytearray(await answer.content.readany())
        first = time.monotonic()
        async for piece in answer.content.iter_any():
            received += piece
    if answer.status == 200 and not received.rstrip().endswith(b"data: [DONE]"):
        raise RuntimeError(f"a stream was cut: {bytes(received[-200:])!r}")
    retry_after = answer.headers.get("Retry-After")
    return Outcome(request_class, answer.status, first - began, time.monotonic() - began, retry_after)


async def keep_full(
    http: aiohttp.ClientSession, url: str, request_class: str, clients: int, sizes: Sizes
) -> list[Outcome]:
    """Send requests in a closed loop: each client sends its next request after its last answer."""
    end, outcomes = time.monotonic() + sizes.seconds, list[Outcome]()

    async def go_on() -> None:
        while time.monotonic() < end:
            outcomes.append(await send(http, url, request_class, sizes.tokens))

    await asyncio.gather(*(go_on() for _ in range(clients)))
    return outcomes


async def arrive(http: aiohttp.ClientSession, url: str, rate: float, sizes: Sizes) -> list[Outcome]:
    """Send requests in an open loop: `rate` requests a second, independent of the answers."""
    sent: list[Awaitable[Outcome]] = []
    began = time.monotonic()
    for number in range(round(rate * sizes.seconds)):
        await asyncio.sleep(max(0.0, began + number / rate - time.monotonic()))
        request_class = LOW if number % ONE_OF else BEST
        sent.append(asyncio.create_task(send(http, url, request_class, sizes.tokens)))
    return await asyncio.gather(*sent)


def count_per_second(outcomes: list[Outcome], seconds: float) -> float:
    """Return the complete answers per second."""
    return sum(outcome.status == 200 for outcome in outcomes) / seconds


def token_seconds(outcomes: list[Outcome], tokens: int) -> float:
    """Return the median time between two tokens."""
    return median((outcome.seconds - outcome.first_seconds) / (tokens - 1) for outcome in outcomes)


async def measure(url: str, sizes: Sizes) -> dict[str, Any]:
    """Run all parts, one after the other."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        await keep_full(http, url, LOW, sizes.rows, Sizes(1.0, sizes.rows, sizes.tokens))  # warm
        full = await timed(keep_full(http, url, LOW, 2 * sizes.rows, sizes))
        own, _ = await timed(keep_full(http, url, BEST, sizes.rows, sizes))
        capacity = count_per_second(*full)
        at_capacity = await timed(arrive(http, url, capacity, sizes))
        overload, seconds = await timed(arrive(http, url, OVERLOAD * capacity, sizes))
    best = [outcome for outcome in overload if outcome.request_class == BEST and outcome.status == 200]
    refused = Counter(outcome.retry_after for outcome in overload if outcome.status == 429)
    return {
        "capacity_per_second": round(capacity, 1),
        "goodput_at_capacity": round(count_per_second(*at_capacity), 1),
        "goodput_at_ten_times": round(count_per_second(overload, seconds), 1),
        "statuses": dict(Counter(outcome.status for outcome in overload)),
        "best_statuses": dict(Counter(o.status for o in overload if o.request_class == BEST)),
        "retry_after": {str(value): count for value, count in refused.items()},
        "answer_seconds": round(median(outcome.seconds for outcome in own), 3),
        "best_first_token_p99_seconds": round(percentile((o.first_seconds for o in best), 99), 3),
        "token_milliseconds_of_its_own": round(1000 * token_seconds(own, sizes.tokens), 3),
        "token_milliseconds_in_overload": round(1000 * token_seconds(best, sizes.tokens), 3),
    }


async def timed(outcomes: Awaitable[list[Outcome]]) -> tuple[list[Outcome], float]:
    """Return the outcomes, and the seconds until the last of them."""
    began = time.monotonic()
    return await outcomes, time.monotonic() - began


def judge(result: dict[str, Any]) -> dict[str, bool]:
    """Return each bar and whether it is met."""
    return {
        "goodput": result["goodput_at_ten_times"] >= GOODPUT_BAR * result["goodput_at_capacity"],
        "only 200 and 429": set(result["statuses"]) <= {200, 429},
        "the most urgent class is never refused": set(result["best_statuses"]) == {200},
        "its wait": result["best_first_token_p99_seconds"] <= WAIT_BAR * result["answer_seconds"],
        "its tokens": result["token_milliseconds_in_overload"] <= TOKEN_BAR * result["token_milliseconds_of_its_own"],
    }


def run(sizes: Sizes) -> dict[str, Any]:
    """Start all programs, and measure."""
    with ControlPlane() as plane, tempfile.TemporaryDirectory() as name:
        api, folder = Api(plane.kubeconfig), Path(name)
        install_definitions(api)
        fields: dict[str, Any] = {"max_num_seqs": sizes.rows, "num_kv_blocks": 8192, "host": "0.0.0.0"}
        with EngineServer(folder / "engine", write_chat_model(folder / "tiny"), IDLE, **fields) as engine:
            cluster = Cluster(api, "default")
            queue = {"maxRequests": 4 * sizes.rows, "timeout": "60s", "classes": CLASSES}
            cluster.apply_service("tiny", batching={"maxBatchSize": sizes.rows}, queue=queue)
            cluster.apply_engine("tiny", own_address(), int(engine.wait_ready().url.rpartition(":")[2]))
            with GatewayProcess(plane.kubeconfig) as gateway:
                ready = {"namespace": "default", "inference_service": "tiny"}
                wait_until("its engine", lambda: gateway.metric("conveyor_gateway_engines", **ready) == 1)
                return asyncio.run(measure(f"{gateway.url}/default/tiny/v1/completions", sizes))


def main(argv: Sequence[str]) -> int:
    """Entry point of the command `overload`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the four parts")
    parser.add_argument("--rows", type=int, default=8, help="requests that the engine runs at once")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    sizes = Sizes(**vars(parser.parse_args(argv)))
    result = run(sizes)
    bars = judge(result)
    for name, value in result.items():
        print(f"{name:32} {value}")
    for name, met in bars.items():
        print(f"bar {name:28} {'met' if met else 'MISSED'}")
    load_average = [round(load, 1) for load in os.getloadavg()]
    print(json.dumps({"benchmark": "overload", **result, "bars_met": bars, "load_average": load_average}))
    return 0 if all(bars.values()) else 1
