"""`python -m conveyor_bench paint-served`: pictures in time over HTTP, beside diffusers' pipeline behind LitServe.

The model is a tiny random one. Each system is a server on one thread: the engine in mode Dynamic, the engine in mode
Continuous, and LitServe, which calls diffusers' own pipeline with the pictures of a batch. All pictures have the same
number of steps, because a call of the pipeline has one number. All servers run, but only one of them gets requests at
a time. Requests arrive at random times (Poisson), at parts of the rate that the engine reaches in mode Continuous when
all requests wait. The objective is a multiple of the time of a picture that is alone there.

LitServe must be installed: `uv run --no-sync --with litserve==0.2.19 python -m conveyor_bench paint-served`. The last
line printed is one JSON object.
"""

import argparse
import asyncio
import base64
import importlib.util
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import numpy as np
from PIL import Image
from tests.engine.paint_layouts import PIPELINES, save_layout

from conveyor_bench.processes import end, find_ports, start
from conveyor_engine.openmp import SPIN_COUNT
from conveyor_load.percentiles import percentile

LITSERVE = "litserve"
SYSTEMS = {"dynamic": "Dynamic", "continuous": "Continuous", LITSERVE: "diffusers behind LitServe"}
_START_SECONDS, _HERE = 300.0, Path(__file__).parent


class Server:
    """A running server of one system."""

    def __init__(self, session: aiohttp.ClientSession, url: str, fields: dict[str, Any]) -> None:
        self._session, self._url, self._fields = session, url, fields

    async def paint(self, seed: int) -> bytes:
        """Return the PNG of the picture with this seed. Raises aiohttp.ClientError."""
        body = {"prompt": "a red circle", "seed": seed, **self._fields}
        async with self._session.post(self._url, json=body) as answer:
            answer.raise_for_status()
            return base64.b64decode((await answer.json())["data"][0]["b64_json"])

    async def serve(self, arrivals: Sequence[float]) -> tuple[list[float], float]:
        """Send a request at each of these times, in seconds. Return the seconds of each, and of all together."""
        begin, seconds = time.monotonic(), [0.0] * len(arrivals)

        async def send(number: int) -> None:
            await self.paint(number)
            seconds[number] = time.monotonic() - begin - arrivals[number]

        async with asyncio.TaskGroup() as group:
            for number, due in enumerate(arrivals):
                await asyncio.sleep(max(0.0, begin + due - time.monotonic()))
                group.create_task(send(number))
        return seconds, time.monotonic() - begin


@asynccontextmanager
async def running(
    system: str, model: Path, flags: argparse.Namespace, session: aiohttp.ClientSession
) -> AsyncIterator[Server]:
    """Start the system's server and wait until it makes a picture. Raises RuntimeError."""
    port, log = find_ports(), model.parent / f"{system}.log"
    if system == LITSERVE:
        path, script = "/predict", str(_HERE / "serve_litserve_pictures.py")
        command = [sys.executable, script, str(model), str(port), str(flags.batch), str(flags.steps)]
    else:
        path = "/v1/images/generations"
        command = [sys.executable, "-m", "conveyor_engine", "serve", f"--model={model}", "--served-model-name=model"]
        command += ["--host=127.0.0.1", f"--port={port}", "--device=cpu", "--dtype=float32", "--num-threads=1"]
        command += [f"--batching-mode={system}", f"--max-num-seqs={flags.batch}", "--max-num-queued-requests=1000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(SPIN_COUNT, None)
    process = await asyncio.to_thread(start, command, environment, log)
    try:
        fields, begin = {"size": flags.size, "num_inference_steps": flags.steps}, time.monotonic()
        server = Server(session, f"http://127.0.0.1:{port}{path}", fields)
        while True:
            try:
                await server.paint(0)
                break
            except aiohttp.ClientError as error:
                if process.poll() is not None or time.monotonic() - begin > _START_SECONDS:
                    raise RuntimeError(f"{system} does not answer: {error!r}; {log.read_text()[-2000:]}") from error
                await asyncio.sleep(0.25)
        yield server
    finally:
        await asyncio.to_thread(end, process)


def draw_arrivals(rate: float, number: int) -> list[float]:
    """Return random times in seconds, the same multiples of 1 / rate at each rate."""
    random, now, times = Random(20261201), 0.0, []
    for _ in range(number):
        now += random.expovariate(rate)
        times.append(now)
    return times


def differ(one: bytes, other: bytes) -> int:
    """Return the largest difference of two pictures, of 255."""
    first, second = (np.asarray(Image.open(io.BytesIO(png)).convert("RGB"), dtype=int) for png in (one, other))
    return int(np.abs(first - second).max())


async def compare(model: Path, flags: argparse.Namespace) -> dict[str, Any]:
    """Measure all systems at all loads, and print a table. Raises RuntimeError if the systems' pictures differ."""
    limit = aiohttp.ClientTimeout(total=600)
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=limit)
        )
        servers = {
            system: await stack.enter_async_context(running(system, model, flags, session))
            for system in flags.systems.split(",")
        }
        pictures = [await server.paint(7) for server in servers.values()]
        if any(differ(pictures[0], other) > 1 for other in pictures):
            raise RuntimeError(f"the pictures of {', '.join(servers)} differ")
        first = servers.get("continuous") or next(iter(servers.values()))
        alone = percentile([(await first.serve([0.0]))[1] for _ in range(5)], 50)
        await first.serve([0.0] * flags.pictures)
        capacity = flags.pictures / (await first.serve([0.0] * flags.pictures))[1]
        objective = flags.objective * alone
        print(f"alone {alone:.3f} s, capacity {capacity:.2f} a second, objective {objective:.3f} s", flush=True)
        print(
            "| load | system | arrive/s | done/s | in time/s | P50 | P95 |\n| --- | --- | --- | --- | --- | --- | --- |"
        )
        results: dict[str, Any] = {"alone": alone, "capacity": capacity, "objective": objective}
        for number, load in enumerate(flags.loads):
            arrivals = draw_arrivals(load * capacity, flags.pictures)
            for system in servers if number % 2 else reversed(servers):
                seconds, whole = await servers[system].serve(arrivals)
                in_time = sum(each <= objective for each in seconds) / whole
                p50, p95 = (percentile(seconds, share) for share in (50, 95))
                results[f"{system}, {load}"] = {"in_time": in_time, "p50": p50, "p95": p95}
                rates = f"{load * capacity:.2f} | {len(seconds) / whole:.2f} | {in_time:.2f}"
                print(f"| {load:g} | {SYSTEMS[system]} | {rates} | {p50:.2f} s | {p95:.2f} s |", flush=True)
    return results


def main(arguments: Sequence[str]) -> int:
    """Entry point of the command `paint-served`."""
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench paint-served", description=__doc__)
    parser.add_argument("--layout", choices=PIPELINES, default="xl", help="of the tiny random model")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="comma-separated")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.75, 1.0, 1.25, 1.5], help="of the capacity")
    parser.add_argument("--pictures", type=int, default=80, help="at each load")
    parser.add_argument("--batch", type=int, default=8, help="the most pictures in a batch")
    parser.add_argument("--steps", type=int, default=20, help="inference steps of each picture")
    parser.add_argument("--size", default="64x64", help="of each picture, in pixels")
    parser.add_argument("--objective", type=float, default=2.0, help="multiple of the time of a picture that is alone")
    flags = parser.parse_args(arguments)
    if unknown := {*flags.systems.split(",")} - {*SYSTEMS}:
        parser.error(f"--systems has {unknown.pop()!r}, which is none of {', '.join(SYSTEMS)}")
    if LITSERVE in flags.systems and importlib.util.find_spec(LITSERVE) is None:
        parser.error("LitServe is not installed; run: uv run --no-sync --with litserve==0.2.19 python -m ...")
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        save_layout(model, flags.layout)
        results = asyncio.run(compare(model, flags))
    print(json.dumps(results | {"options": vars(flags)}))
    return 0
