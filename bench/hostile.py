"""What the gateway, the metrics server and the operator do for others while a client or an engine is hostile.

    .venv/bin/python bench/hostile.py                 # or `make soak`; names choose: hostile.py idle readers

Real processes on a real API server (the control plane of the tests), all on the loopback, each attack for some seconds.
Prints each bar of each attack with what somebody else (`others`) measured meanwhile, met or missed, and ends with
status 1 if one is missed; the last line is one JSON object. Attacks that cost much processor time are measured twice,
first while they are aimed at a second gateway: what is judged is the difference, without the shared processors.
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `e2e` and `tests` are no installed packages

from attacks import ATTACKS, COMPARED, HOSTILE, MIB, NUM_REFUSING, Stage, run_engine
from others import NEVER, Asked, Others, Taken
from tests.engine.processes import EngineServer
from tests.gateway.cluster import Cluster, own_address
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import (
    SLICES,
    VALUES,
    build_slice,
    register,
    running_server,
    write_serving_certificate,
)

from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

ROOT = Path(__file__).resolve().parents[1]
MODEL = Path.home() / ".cache" / "conveyor" / "models" / "demo"
TIMEOUT_SECONDS = 3  # of the hostile service


# The stage


@contextlib.contextmanager
def running_operator(plane: ControlPlane) -> Iterator[int]:
    """Its admin port, which answers."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = int(bound.getsockname()[1])
    command = [sys.executable, "-m", "conveyor_operator", "--host=127.0.0.1", f"--admin-port={port}"]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, f"--kubeconfig={plane.kubeconfig}", "--metrics-api=false"], cwd=ROOT, stdout=log, stderr=log
        )
        try:
            wait_until("operator", lambda: not socket.socket().connect_ex(("127.0.0.1", port)), 30, lambda: None)
            yield port
        finally:
            process.terminate()
            process.wait(30)


@contextlib.contextmanager
def running_metrics(plane: ControlPlane, gateway: tuple[str, int]) -> Iterator[tuple[int, int]]:
    """HTTPS and admin port of the metrics server, registered with the API server, which asks this one gateway."""
    api = Api(plane.kubeconfig)
    api.apply(f"{SLICES}/gateway", build_slice("gateway", [gateway]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder, "authority")
        write_serving_certificate(authority, folder)
        with running_server(plane, folder) as (_, https_port, admin_port):
            register(api, https_port, authority)
            yield https_port, admin_port


@contextlib.contextmanager
def running_engine(address: str, num_ports: int = 1) -> Iterator[list[int]]:
    command = [sys.executable, __file__, "--engine-address", address, "--engine-ports", str(num_ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        yield [int(port) for port in engine.stdout.readline().split()]
        engine.stdin.close()


@contextlib.contextmanager
def running_real_engine() -> Iterator[list[int]]:
    """Conveyor's own, with the demo's model."""
    options = {"host": "0.0.0.0", "max_num_seqs": 32, "num_threads": 1}
    with tempfile.TemporaryDirectory() as folder, EngineServer(Path(folder, "server"), MODEL, **options) as engine:
        yield [int(engine.wait_ready().url.rpartition(":")[2])]


def prepare(plane: ControlPlane, address: str, ports: dict[str, list[int]]) -> None:
    """The services, each with its engines' ports."""
    api = Api(plane.kubeconfig)
    install_definitions(api)
    cluster = Cluster(api, "default")
    for name, of_service in ports.items():
        timeout_seconds = TIMEOUT_SECONDS if name == "hostile" else 600
        limits = {"requestTimeout": f"{timeout_seconds}s", "queue": {"maxRequests": 5000, "timeout": "10m"}}
        cluster.apply_service(name, batching={"maxBatchSize": 8}, **limits)
        for port in of_service:
            cluster.apply_engine(name, address, port)


# The bars


@dataclass(frozen=True, slots=True)
class Bar:
    """What is judged is what the attack added: `beside` less `alone`, which is 0 where the bar is an absolute one."""

    attack: str
    name: str
    alone: float
    beside: float
    limit: float

    @property
    def met(self) -> bool:
        return self.beside - self.alone < self.limit

    def __str__(self) -> str:
        figures = f"alone {self.alone:8.3f}  beside {self.beside:8.3f}  bar + {self.limit:5g}"
        return f"{self.attack:8}  {self.name:32}  {figures}  {'met' if self.met else 'MISSED'}"


def p99(values: list[float]) -> float:
    """Nearest rank: an answer that never came stays one."""
    return sorted(values)[int(len(values) * 0.99)]


def judge(attack: str, alone: Taken, beside: Taken, mib: tuple[float, float], places_seconds: float) -> list[Bar]:
    def bar(name: str, before: float, meanwhile: float, limit: float) -> Bar:
        return Bar(attack, name, before, meanwhile, limit)

    bars = [
        bar("another's longest wait, s", max(alone.requests), max(beside.requests), 1),
        bar("another's p99 token gap, ms", p99(alone.gaps) * 1000, p99(beside.gaps) * 1000, 50),
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
    """Attacks; then the seconds from its begin until the hostile service holds no request any more."""
    began = time.monotonic()
    await ATTACKS[name](stage)
    while time.monotonic() < began + 60:
        status, text = await asyncio.to_thread(stage.gateway.admin, "/demand")
        if status == 200 and not json.loads(text)["services"][HOSTILE]["in_flight"]:
            return time.monotonic() - began
        await asyncio.sleep(0.1)
    return float("inf")


async def attack(stage: Stage, others: Others, name: str, seconds: float) -> list[Bar]:
    def rss() -> float:
        pages = int(Path(f"/proc/{stage.gateway.process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() / MIB

    await asyncio.to_thread(others.read)  # what came before
    await asyncio.sleep(seconds / 2)
    alone = await asyncio.to_thread(others.read)
    before = peak = rss()
    began = time.monotonic()
    async with contextlib.AsyncExitStack() as stage.clients:
        attacking = asyncio.create_task(take_places(stage, name))
        while time.monotonic() < began + seconds or not attacking.done():
            await asyncio.sleep(0.1)
            peak = max(peak, rss())
        beside = await asyncio.to_thread(others.read)
        return judge(name, alone, beside, (before, peak), await attacking)


async def compare(stages: tuple[Stage, Stage], others: Others, name: str, seconds: float) -> list[Bar]:
    """The attack on another gateway, and then on that of `others`."""
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
    return judge_compared(name, *taken)


def judge_compared(name: str, elsewhere: Taken, elsewhere_after: Taken, here: Taken, here_after: Taken) -> list[Bar]:
    def figures(of: Callable[[list[float]], float], *taken: Taken) -> list[float]:
        return [of(each.requests) * 1000 for each in taken]

    num_failed = sum(seconds == NEVER for seconds in here.requests)
    return [
        Bar(name, "others' p50, ms", *figures(median, elsewhere, here), 3),
        Bar(name, "others' p99, ms", *figures(p99, elsewhere, here), 30),
        Bar(name, "others' requests that failed", 0, num_failed, 1),
        Bar(name, "others' p99 after 1 s, ms", *figures(p99, elsewhere_after, here_after), 30),
        Bar(name, "slowest probe or /demand, s", 0, max(here.probes), 1),
    ]


async def run_attacks(stages: tuple[Stage, Stage], others: Others, names: list[str], seconds: float) -> bool:
    bars = []
    for name in names:
        if name in COMPARED:
            measured = await compare(stages, others, name, seconds)
        else:
            measured = await attack(stages[1], others, name, seconds)
        for bar in measured:
            print(bar, flush=True)
            bars.append(bar)
    rows = [asdict(bar) | {"met": bar.met} for bar in bars]
    print(json.dumps({"benchmark": "hostile", "load_average": os.getloadavg(), "bars": rows}))
    return all(bar.met for bar in bars)


def run(names: list[str], seconds: float, rate: int, open_files: int | None) -> bool:
    address = own_address()
    with contextlib.ExitStack() as stack:
        plane = stack.enter_context(ControlPlane())
        ports = {name: stack.enter_context(running_engine(address)) for name in ("hostile", "good")}
        ports |= {"refusing": stack.enter_context(running_engine(address, NUM_REFUSING)), "empty": []}
        if "choices" in names:
            ports["real"] = stack.enter_context(running_real_engine())
        prepare(plane, address, ports)
        operator = stack.enter_context(running_operator(plane))
        gateway, elsewhere = (
            stack.enter_context(GatewayProcess(plane.kubeconfig, "--host=", max_open_files=open_files))
            for _ in range(2)
        )  # on every address: no slice may name a loopback
        https, metrics = stack.enter_context(running_metrics(plane, (address, gateway.admin_port)))
        for name in ports.keys() - {"empty"}:
            labels = {"namespace": "default", "inference_service": name}
            for each in (gateway, elsewhere):
                wait_until("engines", partial(each.metric, "conveyor_gateway_engines", **labels), 20, lambda: None)
        probes = {gateway.port: "healthz", gateway.admin_port: "readyz", metrics: "livez", operator: "livez"}
        urls = [f"http://127.0.0.1:{port}/{path}" for port, path in probes.items()]
        urls.append(f"http://127.0.0.1:{gateway.admin_port}/demand?service=default/good")
        value = VALUES.format(version="v1beta2", namespace="default", name="good", metric="inference_queue_depth")
        wait_until("the HPA's value", partial(Api(plane.kubeconfig).reachable, value), 30, lambda: None)
        service = f"{gateway.url}/default/good/v1/completions"
        others = stack.enter_context(Others(Asked(service, urls, str(plane.kubeconfig), value)))
        stages = (
            Stage(elsewhere, [], rate),
            Stage(gateway, [*probes, https], rate),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_attacks(stages, others, names, seconds))


def main() -> int:
    names = [*ATTACKS, *COMPARED]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("attacks", nargs="*", metavar="attack", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--engine-address", help=argparse.SUPPRESS)
    parser.add_argument("--engine-ports", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each attack")
    parser.add_argument("--rate", type=int, default=250, help="new connections a second of the attacks that compare")
    parser.add_argument("--open-files", type=int, help="RLIMIT_NOFILE of both gateways; default: the system's")
    arguments = parser.parse_args()
    if unknown := set(arguments.attacks) - set(names):
        parser.error(f"no such attack: {', '.join(sorted(unknown))}")
    if arguments.engine_address:
        asyncio.run(run_engine(arguments.engine_address, arguments.engine_ports))
        return 0
    return 0 if run(arguments.attacks or names, arguments.seconds, arguments.rate, arguments.open_files) else 1


if __name__ == "__main__":
    sys.exit(main())
