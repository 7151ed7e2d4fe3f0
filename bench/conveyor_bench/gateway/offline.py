"""Measures live requests beside an offline job: their latency, and how much the job gets done.

Runs one real gateway, one real engine with the demo's model, a real API server, and `python -m conveyor_jobs`. Live
requests arrive at random, at a third of the rate that the engine can do. Four situations take turns: live requests
alone, beside a job of the same class, beside a job of a less urgent class, and beside one that also has at most half of
the places. The last line is one JSON object.
"""

import argparse
import asyncio
import json
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import aiohttp
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_load.percentiles import percentile
from conveyor_protocol.request_headers import CLASS_HEADER
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.demo_model import demo_model_directory

ROWS: Final = 8
TOKENS: Final = 48
LIVE, BATCH = "live", "batch"
LEVELS: Final = [{"name": LIVE, "level": 0}, {"name": BATCH, "level": 10}]
SHARES: Final = [{"name": LIVE, "level": 0}, {"name": BATCH, "level": 10, "maxShare": 50}]
LIVE_SHARE: Final = 1 / 3
BODY: Final = {"prompt": "The with statement", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
NUM_REQUESTS: Final = 100_000  # of a job, which is ended before it has sent them
ALONE, SAME, LOWER, HALF = (
    "live alone",
    "beside a job of the same class",
    "beside a job of a lower class",
    "the same with maxShare: 50",
)
# The classes of the service of each situation.
SITUATIONS: Final[dict[str, list[dict[str, Any]]]] = {ALONE: SHARES, SAME: [], LOWER: LEVELS, HALF: SHARES}


class Job:
    """`python -m conveyor_jobs`, from start to SIGTERM."""

    def __init__(self, folder: Path, url: str, *flags: str) -> None:
        self._folder, self._url, self._flags = folder, url, flags

    async def __aenter__(self) -> "Job":
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "conveyor_jobs", f"--input={self._folder.parent / 'in.jsonl'}"),
            *(f"--output={self._folder}", f"--url={self._url}", "--log-level=WARNING", *self._flags),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        await self._process.wait()

    def count(self) -> int:
        """Return how many responses the job has written."""
        output = self._folder / "output.jsonl"
        return output.read_bytes().count(b"\n") if output.exists() else 0


async def send(http: aiohttp.ClientSession, url: str, headers: dict[str, str]) -> float:
    """Return the seconds until the whole answer has arrived. Raises RuntimeError without one."""
    began = time.monotonic()
    async with http.post(f"{url}/v1/completions", json=BODY, headers=headers) as answer:
        text = await answer.text()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {text[:200]}")
    return time.monotonic() - began


async def measure_capacity(http: aiohttp.ClientSession, url: str, seconds: float) -> float:
    """Return the requests per second of a full batch."""
    end, done = time.monotonic() + seconds, 0

    async def go_on() -> None:
        nonlocal done
        while time.monotonic() < end:
            await send(http, url, {})
            done += 1

    began = time.monotonic()
    await asyncio.gather(*(go_on() for _ in range(ROWS)))
    return done / (time.monotonic() - began)


async def arrive(
    http: aiohttp.ClientSession, url: str, rate: float, seconds: float, headers: dict[str, str]
) -> list[float]:
    """Send live requests for this long, and return the seconds that each one took."""
    tasks = list[asyncio.Task[float]]()
    due, end = time.monotonic(), time.monotonic() + seconds
    while (due := due + random.expovariate(rate)) < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        tasks.append(asyncio.create_task(send(http, url, headers)))
    return await asyncio.gather(*tasks)


async def measure(urls: dict[str, str], folder: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Run the situations in turns, each with its own service on the one engine."""
    line = {"url": "/v1/completions", "body": BODY}
    with (folder / "in.jsonl").open("w") as file:
        file.writelines(json.dumps({"custom_id": str(number), **line}) + "\n" for number in range(NUM_REQUESTS))
    latencies, answered = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        capacity = await measure_capacity(http, urls[SAME], seconds / 2)
        rate = capacity * LIVE_SHARE
        for number in range(rounds):
            for name, url in urls.items():
                print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                headers = {CLASS_HEADER: LIVE} if SITUATIONS[name] else {}
                if name == ALONE:
                    latencies[name] += await arrive(http, url, rate, seconds, headers)
                    continue
                flags = [f"--request-class={BATCH}"] if SITUATIONS[name] else []
                async with Job(folder / f"{number}-{name}", url, *flags) as job:
                    while not job.count():  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                    before = job.count()
                    latencies[name] += await arrive(http, url, rate, seconds, headers)
                    answered[name].append((job.count() - before) / seconds)
    return {
        "capacity_per_second": capacity,
        "live_per_second": rate,
        "live_seconds": {
            name: {"requests": len(took), "p50": median(took), "p95": percentile(took, 95)}
            for name, took in latencies.items()
        },
        "job_per_second": {name: median(counts) for name, counts in answered.items()},
    }


def wait_known(gateway: GatewayProcess, service: str) -> None:
    labels = {"namespace": "default", "inference_service": service}
    wait_until("the engine", lambda: gateway.metric("conveyor_gateway_engines", **labels) == 1)


def run(rounds: int, seconds: float) -> dict[str, Any]:
    address, model, urls = own_address(), demo_model_directory(), dict[str, str]()
    with tempfile.TemporaryDirectory() as folder, ControlPlane() as control_plane:
        api = Api(control_plane.kubeconfig)
        install_definitions(api)
        cluster = Cluster(api, "default")
        with (
            EngineServer(Path(folder) / "engine", model, host="0.0.0.0", max_num_seqs=ROWS, dtype="bfloat16") as engine,
            GatewayProcess(control_plane.kubeconfig) as gateway,
        ):
            port = int(engine.wait_ready().url.rpartition(":")[2])
            for number, (situation, classes) in enumerate(SITUATIONS.items()):
                name = f"service-{number}"
                cluster.apply_service(name, batching={"maxBatchSize": ROWS}, queue={"classes": classes})
                cluster.apply_engine(name, address, port)
                wait_known(gateway, name)
                urls[situation] = f"{gateway.url}/default/{name}"
            return asyncio.run(measure(urls, Path(folder), rounds, seconds))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench offline", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each situation (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a turn (default: %(default)s)")
    flags = parser.parse_args(arguments)
    result = run(flags.rounds, flags.seconds)
    print(f"{'':34} {'live p50 ms':>12} {'live p95 ms':>12} {'job, requests/s':>16}")
    for name in SITUATIONS:
        live, job = result["live_seconds"].get(name), result["job_per_second"].get(name)
        times = [f"{live[key] * 1000:.0f}" if live else "" for key in ("p50", "p95")]
        print(f"{name:34} {times[0]:>12} {times[1]:>12} {'' if job is None else f'{job:.1f}':>16}")
    print(json.dumps(result))
    return 0
