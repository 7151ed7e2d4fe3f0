"""Measures how hostile clients and engines affect others' use of gateway, metrics server and operator.

It runs real processes on a real API server (the control plane of the tests). Attackers connect over the loopback, and
each attack lasts for some seconds. Another client (`others`) measures meanwhile. Attacks that cost much processor time
are measured twice, first while they are aimed at a second gateway. The bars for latency limit the difference, so that
the shared processors do not count.

Prints each bar of each attack, met or missed, and exits with 1 if one is missed. The last line is one JSON object.
`make soak` runs all attacks.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import uvloop
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess

from conveyor_bench.hostile.bars import NEVER, Bar, print_result
from conveyor_bench.hostile.gateway.attacks import (
    ATTACKS,
    CLIENTS,
    GUARDED,
    HOSTILE,
    NUM_REFUSING,
    OF_TENANT,
    TENANT,
    Stage,
)
from conveyor_bench.hostile.gateway.jobs import JOBS
from conveyor_bench.hostile.gateway.keys import KEYS
from conveyor_bench.hostile.gateway.others import Taken, Targets
from conveyor_bench.hostile.others import Others
from conveyor_bench.hostile.stage import running_metrics, running_operator, serve_metrics, value_path
from conveyor_bench.processes import Child, resident_mib
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api, wait_until
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.cluster.paths import CACHE

MODEL = CACHE / "models" / "demo"
TIMEOUT_SECONDS = 3  # of the hostile service
JOB_MIB = 512  # the limit of the pod in docs/jobs.md
START_SECONDS, MAX_LINES = 120, 30  # of a gateway beside 100,000 APIKeys of one namespace
COMPARED = CLIENTS | JOBS


# The stage


@contextlib.contextmanager
def running_engine(address: str, num_ports: int = 1) -> Iterator[list[int]]:
    with Child("hostile.gateway.engines", address, str(num_ports)) as engine:
        yield [int(port) for port in engine.read_line().split()]


@contextlib.contextmanager
def running_real_engine() -> Iterator[list[int]]:
    """Run Conveyor's own engine with the demo's model."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "server")
        with EngineServer(folder, MODEL, host="0.0.0.0", max_num_seqs=32, num_threads=1) as engine:
            yield [int(engine.wait_ready().url.rpartition(":")[2])]


def prepare(plane: ControlPlane, address: str, ports: dict[str, list[int]]) -> None:
    """Create the services, each with its engines' ports, and those of the attacking tenant."""
    api = Api(plane.kubeconfig)
    install_definitions(api)
    api.create("/api/v1/namespaces", {"metadata": {"name": TENANT}})
    tenant, cluster = Cluster(api, TENANT), Cluster(api, "default")
    long = {"requestTimeout": "2h", "queue": {"maxRequests": 5000, "timeout": "1h"}}
    for name in OF_TENANT:
        tenant.apply_service(name, batching={"maxBatchSize": 1024, "mode": "Continuous"}, **long)
        tenant.apply_engine(name, address, ports["hostile"][0])
    tenant.apply_service(GUARDED, access={"mode": "Required"})
    for name, of_service in ports.items():
        timeout_seconds = TIMEOUT_SECONDS if name == "hostile" else 600
        limits = {"requestTimeout": f"{timeout_seconds}s", "queue": {"maxRequests": 5000, "timeout": "10m"}}
        cluster.apply_service(name, batching={"maxBatchSize": 8}, **limits)
        for port in of_service:
            cluster.apply_engine(name, address, port)


def sees_engines(gateway: GatewayProcess, service: str, namespace: str = "default") -> bool:
    return gateway.metric("conveyor_gateway_engines", namespace=namespace, inference_service=service) > 0


# The bars


def judge(attack: str, alone: Taken, beside: Taken, mib: tuple[float, float], places_seconds: float) -> list[Bar]:
    def bar(name: str, before: float, meanwhile: float, limit: float) -> Bar:
        return Bar(attack, name, before, meanwhile, limit)

    bars = [
        bar("another's longest wait, s", max(alone.requests), max(beside.requests), 1),
        bar("another's p99 token gap, ms", percentile(alone.gaps, 99) * 1000, percentile(beside.gaps, 99) * 1000, 50),
        bar("slowest probe or /demand, s", 0, max(beside.probes), 1),
        bar("slowest answer to the HPA, s", 0, max(beside.values), 1),
        bar("gateway's memory at most, MiB", *mib, 200),
    ]
    if attack in ("interim", "tiny"):
        bars.append(bar("others' p50, ms", median(alone.requests) * 1000, median(beside.requests) * 1000, 5))
    if attack in ("readers", "writers"):
        limit = TIMEOUT_SECONDS + 5 + 10 * (attack == "writers")
        bars.append(bar("the service's places are back, s", 0, places_seconds, limit))
    return bars


# The attacks


async def take_places(stage: Stage, name: str) -> float:
    """Run the attack. Returns the seconds from its beginning until the hostile service has no request in flight."""
    began = time.monotonic()
    await (ATTACKS | KEYS)[name](stage)
    while time.monotonic() < began + 60:
        status, text = await asyncio.to_thread(stage.gateway.admin, "/demand")
        if status == 200 and not json.loads(text)["services"][HOSTILE]["in_flight"]:
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    return NEVER


async def attack(stage: Stage, others: Others[Taken], name: str, seconds: float) -> list[Bar]:
    pid = stage.gateway.process.pid
    await asyncio.to_thread(others.read)  # what came before
    await asyncio.sleep(seconds / 2)
    alone = await asyncio.to_thread(others.read)
    before = peak = resident_mib(pid)
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stage.clients:
        attacking = asyncio.create_task(take_places(stage, name))
        while time.monotonic() < began + seconds or not attacking.done():
            await asyncio.sleep(0.1)
            peak = max(peak, resident_mib(pid))
        beside = await asyncio.to_thread(others.read)
        bars = judge(name, alone, beside, (before, peak), await attacking)
        if name in KEYS:
            bars.append(Bar(name, "another gateway's start, s", 0, stage.start_seconds, START_SECONDS))
            bars.append(Bar(name, "lines in a gateway's log", 0, stage.num_lines, MAX_LINES))
        return bars


async def compare(stages: tuple[Stage, Stage], others: Others[Taken], name: str, seconds: float) -> list[Bar]:
    """Measure the attack on another gateway, and then on the gateway of `others`."""
    taken = []
    for stage in stages:
        await asyncio.to_thread(others.read)  # what came before
        async with contextlib.AsyncExitStack() as stage.clients:
            await COMPARED[name](stage)
            await asyncio.sleep(seconds)
            taken.append(await asyncio.to_thread(others.read))
        await asyncio.sleep(1)
        await asyncio.to_thread(others.read)
        await asyncio.sleep(seconds / 2)
        taken.append(await asyncio.to_thread(others.read))
    bars = judge_compared(name, *taken)
    return [*bars, Bar(name, "a job's memory at most, MiB", 0, stages[1].job_mib, JOB_MIB)] if name in JOBS else bars


def judge_compared(name: str, elsewhere: Taken, elsewhere_after: Taken, here: Taken, here_after: Taken) -> list[Bar]:
    def bar(what: str, percent: int, alone: Taken, beside: Taken, limit: float) -> Bar:
        first, second = (percentile(taken.requests, percent) * 1000 for taken in (alone, beside))
        return Bar(name, what, first, second, limit)

    num_failed = sum(seconds == NEVER for seconds in here.requests)
    return [
        bar("others' p50, ms", 50, elsewhere, here, 3),
        bar("others' p99, ms", 99, elsewhere, here, 30),
        Bar(name, "others' requests that failed", 0, num_failed, 1),
        bar("others' p99 after 1 s, ms", 99, elsewhere_after, here_after, 30),
        Bar(name, "slowest probe or /demand, s", 0, max(here.probes), 1),
    ]


async def run_attacks(stages: tuple[Stage, Stage], others: Others[Taken], names: list[str], seconds: float) -> bool:
    bars = []
    for name in names:
        if name in COMPARED:
            measured = await compare(stages, others, name, seconds)
        else:
            measured = await attack(stages[1], others, name, seconds)
        for bar in measured:
            print(bar, flush=True)
            bars.append(bar)
    return print_result("hostile", bars)


def run(names: list[str], seconds: float, rate: int, open_files: int | None) -> bool:
    address = own_address()
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        ports = {name: stack.enter_context(running_engine(address)) for name in ("hostile", "good")}
        ports |= {"refusing": stack.enter_context(running_engine(address, NUM_REFUSING)), "empty": []}
        if "choices" in names:
            ports["real"] = stack.enter_context(running_real_engine())
        prepare(plane, address, ports)
        _, operator = stack.enter_context(running_operator(plane))
        gateway, elsewhere = (
            stack.enter_context(GatewayProcess(plane.kubeconfig, "--host=", max_open_files=open_files))
            for _ in range(2)
        )  # on every address, because an EndpointSlice cannot contain a loopback address
        metrics = stack.enter_context(running_metrics(plane))
        for name in ports.keys() - {"empty"}:
            for each in (gateway, elsewhere):
                wait_until("engines", partial(sees_engines, each, name))
        for name, each in itertools.product(OF_TENANT, (gateway, elsewhere)):
            wait_until("engines", partial(sees_engines, each, name, TENANT))
        probes = {gateway.port: "healthz", gateway.admin_port: "readyz", metrics.admin_port: "livez", operator: "livez"}
        urls = [f"http://127.0.0.1:{port}/{path}" for port, path in probes.items()]
        urls.append(f"http://127.0.0.1:{gateway.admin_port}/demand?service=default/good")
        api = Api(plane.kubeconfig)
        serve_metrics(api, metrics, (address, gateway.admin_port), "default")
        service = f"{gateway.url}/default/good/v1/completions"
        targets = Targets(service, urls, str(plane.kubeconfig), value_path("default"))
        others = stack.enter_context(Others("gateway.others", targets, Taken))
        stages = (
            Stage(elsewhere, [], rate, api, plane.kubeconfig, plane.etcd_socket),
            Stage(gateway, [*probes, metrics.https_port], rate, api, plane.kubeconfig, plane.etcd_socket),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_attacks(stages, others, names, seconds))


def main(argv: Sequence[str]) -> int:
    names = [*ATTACKS, *COMPARED, *KEYS]  # the keys stay, so they come last
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench hostile", description=__doc__)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--rate", type=int, default=250, help="new connections a second of the attacks that compare")
    parser.add_argument("--open-files", type=int, help="RLIMIT_NOFILE of both gateways; default: the system's")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.attacks) - set(names):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    return 0 if run(arguments.attacks or names, arguments.seconds, arguments.rate, arguments.open_files) else 1
