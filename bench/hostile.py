"""What the gateway, the metrics server and the operator do for others while a client or an engine is hostile.

    .venv/bin/python bench/hostile.py                 # or `make soak`; names choose: hostile.py idle readers

Real processes on a real API server (the control plane of the tests), all on the loopback, each attack for some seconds.
Prints a row for each attack with what somebody else measured meanwhile, and ends with status 1 if a bar is missed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` and `tests` are no installed packages

from attacks import ATTACKS, HOSTILE, MIB, Stage, run_engines
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane

ROOT = Path(__file__).resolve().parents[1]
CRD = ROOT / "crds" / "inferenceservices.conveyor.dev.yaml"
TIMEOUT_SECONDS = 3  # of the hostile service


# The stage


@contextlib.contextmanager
def running(module: str, *arguments: str) -> Iterator[int]:
    """One of our programs as a process; its admin port, which answers."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = int(bound.getsockname()[1])
    command = [sys.executable, "-m", module, "--host=127.0.0.1", f"--admin-port={port}", *arguments]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        try:
            wait_until(module, lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 30, lambda: None)
            yield port
        finally:
            process.terminate()
            process.wait(30)


def prepare(plane: ControlPlane, address: str, port: int) -> None:
    api = Api(plane.kubeconfig)
    crd = yaml.safe_load(CRD.read_text(encoding="utf-8"))
    api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
    wait_until("the CRD", lambda: api.reachable("/apis/conveyor.dev/v1alpha1/inferenceservices"), 20, lambda: None)
    cluster = Cluster(api, "default")
    for name, timeout_seconds in (("hostile", TIMEOUT_SECONDS), ("good", 600)):
        endpoint = {"requestTimeoutSeconds": timeout_seconds, "maxQueuedRequests": 5000}
        cluster.apply_service(name, batching={"maxBatchSize": 8}, endpoint=endpoint)
        cluster.apply_engine(name, address, port)


# What others measure


async def measure(session: aiohttp.ClientSession, stage: Stage, seconds: float) -> dict[str, list[float]]:
    """Seconds of each of somebody else's requests and of the probes; infinite for what was not answered 200."""
    urls = {name: f"http://127.0.0.1:{port}{path}" for name, (port, path) in stage.ports.items()}
    urls["demand"] = f"http://127.0.0.1:{stage.gateway.admin_port}/demand?service=default/good"
    taken: dict[str, list[float]] = {name: [] for name in ("request", *urls)}

    async def ask(name: str, method: str, url: str) -> None:
        began = time.perf_counter()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.request(method, url, data=b"good" if method == "POST" else None) as answer:
                await answer.read()
            taken[name].append(time.perf_counter() - began if answer.status == 200 else float("inf"))
            return
        taken[name].append(float("inf"))

    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        await ask("request", "POST", f"{stage.gateway.url}/default/good/v1/completions")
        if len(taken["request"]) % 10 == 0:
            await asyncio.gather(*(ask(name, "GET", url) for name, url in urls.items()))
        await asyncio.sleep(0.02)
    return taken


async def take_places(stage: Stage, name: str) -> float:
    """Attacks; then the seconds from its begin until the hostile service holds no request any more."""
    began = time.monotonic()
    await ATTACKS[name](stage)
    while time.monotonic() < began + 60:
        status, text = await asyncio.to_thread(stage.gateway.admin, "/demand")
        if status == 200 and not json.loads(text)["services"][HOSTILE]["in_flight"]:
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    return float("inf")


@contextlib.asynccontextmanager
async def others() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(force_close=True)  # a newcomer each time
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=10)) as session:
        yield session


async def attack(stage: Stage, name: str, seconds: float) -> dict[str, Any]:
    def rss() -> float:
        pages = int(Path(f"/proc/{stage.gateway.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB

    async with others() as session:
        alone, before = await measure(session, stage, seconds / 2), rss()
        async with contextlib.AsyncExitStack() as stage.clients:
            attacking = asyncio.create_task(take_places(stage, name))
            taken = await measure(session, stage, seconds)
            places_seconds, after = await attacking, rss()
    probes = [each for what, values in taken.items() if what != "request" for each in values]
    return {
        "attack": name,
        "added_p50_ms": (median(taken["request"]) - median(alone["request"])) * 1000,
        "added_max_seconds": max(taken["request"]) - max(alone["request"]),
        "slowest_probe_seconds": max(probes, default=float("inf")),
        "places_back_seconds": places_seconds,
        "rss_added_mib": after - before,
        "rss_mib": after,
    }


def judge(row: dict[str, Any]) -> dict[str, bool]:
    bars = {
        "nobody waits a second longer": row["added_max_seconds"] < 1,
        "probes within a second": row["slowest_probe_seconds"] < 1,
        "memory": row["rss_added_mib"] < 200,
    }
    if row["attack"] in ("interim", "tiny"):
        bars["p50 + 5 ms"] = row["added_p50_ms"] < 5
    if row["attack"] in ("readers", "writers"):
        bars["places back"] = row["places_back_seconds"] < TIMEOUT_SECONDS + 5 + 10 * (row["attack"] == "writers")
    return bars


async def run_attacks(stage: Stage, names: list[str], seconds: float) -> bool:
    print(
        f"{'attack':10} {'p50 + ms':>9} {'max + s':>8} {'probe s':>8} {'places s':>9} {'RSS +':>10} {'MiB':>5}  missed"
    )
    rows = []
    for name in names:
        row = await attack(stage, name, seconds)
        row["bars_met"] = judge(row)
        values = (
            f"{row['added_p50_ms']:9.1f} {row['added_max_seconds']:8.2f} {row['slowest_probe_seconds']:8.3f} "
            f"{row['places_back_seconds']:9.1f} {row['rss_added_mib']:10.0f} {row['rss_mib']:5.0f}"
        )
        print(f"{name:10} {values}  {', '.join(bar for bar, met in row['bars_met'].items() if not met)}", flush=True)
        rows.append(row)
    print(json.dumps({"benchmark": "hostile", "load_average": os.getloadavg(), "rows": rows}))
    return all(all(row["bars_met"].values()) for row in rows)


def run(names: list[str], seconds: float) -> bool:
    address = own_address()
    engines = [sys.executable, __file__, "--engine-address", address]
    with (
        ControlPlane() as plane,
        subprocess.Popen(engines, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine,
        contextlib.ExitStack() as stack,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        stack.callback(engine.stdin.close)
        prepare(plane, address, int(engine.stdout.readline()))
        kubeconfig = f"--kubeconfig={plane.kubeconfig}"
        operator = stack.enter_context(running("conveyor_operator", kubeconfig, "--metrics-api=false"))
        metrics = stack.enter_context(running("conveyor_metrics", kubeconfig, "--https-port=0"))
        gateway = stack.enter_context(GatewayProcess(plane.kubeconfig))
        for name in ("hostile", "good"):
            labels = {"namespace": "default", "inference_service": name}
            wait_until("engines", partial(gateway.metric, "conveyor_gateway_engines", **labels), 20, lambda: None)
        ports = {
            "gateway": (gateway.port, "/healthz"),
            "gateway admin": (gateway.admin_port, "/readyz"),
            "metrics": (metrics, "/livez"),
            "operator": (operator, "/livez"),
        }
        stage = Stage(gateway, ports, contextlib.AsyncExitStack())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_attacks(stage, names, seconds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(ATTACKS)}; default: all")
    parser.add_argument("--engine-address", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    arguments = parser.parse_args()
    if unknown := set(arguments.attacks) - set(ATTACKS):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    if arguments.engine_address:
        asyncio.run(run_engines(arguments.engine_address))
        return 0
    return 0 if run(arguments.attacks or list(ATTACKS), arguments.seconds) else 1


if __name__ == "__main__":
    sys.exit(main())
