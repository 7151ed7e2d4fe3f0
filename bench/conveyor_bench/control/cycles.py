"""Measures what creating and deleting services leaves in the programs: memory, open files, threads and series.

A real operator, gateway and metrics server run with a real etcd, API server and controller manager. Three autoscaled
services stay. In batches of 50, other services are created, get an address of an engine and a request that the client
gives up, and are deleted. The measurements before and after are those with the three services alone. The first tenth
of the cycles is not counted: programs import and allocate then. Prints a table and one JSON line. Exits with 1 if the
memory of a program grows by more than a bar, or its files, threads or series by more than ten.
"""

import argparse
import contextlib
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from tests.gateway.cluster import make_endpoint, make_slice, own_address, publish_gateway
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import free_port, register, running_server, write_serving_certificate
from tests.operator.stage import Space, make_service, wait_until

from conveyor_api.names import SYSTEM_NAMESPACE
from conveyor_bench.processes import resident_mib, running
from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

NAMESPACE = "default"
STAYING = ("one", "two", "three")
BATCH = 50
AUTOSCALING = {"maxReplicas": 3}
BARS_MIB = {"operator": 30.0, "gateway": 10.0, "metrics": 10.0}
_MOST_MORE = 10  # files, threads and series
_NO_ENGINE_PORT = 9
_CLIENTS = 6


@dataclass(frozen=True, slots=True)
class Held:
    """What a program holds."""

    mib: float
    files: int
    threads: int
    series: int

    @classmethod
    def read(cls, pid: int, admin_port: int) -> "Held":
        with urllib.request.urlopen(f"http://127.0.0.1:{admin_port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        process = Path(f"/proc/{pid}")
        return cls(
            round(resident_mib(pid), 1),
            len(os.listdir(process / "fd")),
            len(os.listdir(process / "task")),
            len([line for line in lines if not line.startswith("#")]),
        )


@dataclass(frozen=True, slots=True)
class Programs:
    """The running programs: process id and admin port of each, and the gateway's address."""

    where: dict[str, tuple[int, int]]
    url: str

    def read(self) -> dict[str, Held]:
        return {name: Held.read(*where) for name, where in self.where.items()}


@contextmanager
def all_running(plane: ControlPlane) -> Iterator[Programs]:
    api = Api(plane.kubeconfig)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        gateway = stack.enter_context(GatewayProcess(plane.kubeconfig, "--host", "", "--drain-delay-seconds", "0"))
        publish_gateway(api, SYSTEM_NAMESPACE, "gateway", gateway.admin_port)
        authority = Authority(folder, "metrics-authority")
        write_serving_certificate(authority, folder)
        metrics, port, metrics_admin = stack.enter_context(running_server(plane, folder))
        register(api, port, authority)
        admin_port = free_port()
        flags = ("--metrics-api=false", f"--admin-port={admin_port}")
        operator: subprocess.Popen[bytes] = stack.enter_context(running("conveyor_operator", plane.kubeconfig, *flags))
        where = {
            "operator": (operator.pid, admin_port),
            "gateway": (gateway.process.pid, gateway.admin_port),
            "metrics": (metrics.pid, metrics_admin),
        }
        yield Programs(where, gateway.url)


class Cycles:
    """Creates and deletes services."""

    def __init__(self, space: Space, url: str) -> None:
        self._space, self._url = space, url
        self._pool = ThreadPoolExecutor(_CLIENTS)

    def run(self, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, BATCH):
            names = [f"s{number}" for number in range(first, min(first + BATCH, numbers.stop))]
            list(self._pool.map(self._create, names))
            for name in names:
                self._space.wait_observed(name)
            list(self._pool.map(self._request, names))
            list(self._pool.map(self._delete, names))
        wait_until("only the others are left", partial(_has_only_staying, self._space), 300)

    def _create(self, name: str) -> None:
        self._space.create("InferenceService", make_service(name, autoscaling=AUTOSCALING))
        engine = make_endpoint(own_address())
        self._space.apply("EndpointSlice", make_slice(name, NAMESPACE, name, _NO_ENGINE_PORT, engine))

    def _request(self, name: str) -> None:
        body, headers = b'{"prompt": "x"}', {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{NAMESPACE}/{name}/v1/completions", body, headers)
        with contextlib.suppress(OSError):
            urllib.request.urlopen(request, timeout=0.3).close()

    def _delete(self, name: str) -> None:
        self._space.delete("InferenceService", name)
        self._space.delete("EndpointSlice", name)
        for served in self._space.list("ServedName"):
            if served["spec"]["name"] == name:
                self._space.delete("ServedName", served["metadata"]["name"])


def _has_only_staying(space: Space) -> bool:
    return all(len(space.list(kind)) == len(STAYING) for kind in ("Deployment", "PodDisruptionBudget"))


def measure(count: int) -> tuple[dict[str, Held], dict[str, Held]]:
    """Return what each program holds after a tenth of the cycles, and after all of them."""
    with ControlPlane(hpa_sync_period_seconds=15) as plane:
        space = Space(Api(plane.kubeconfig), NAMESPACE)
        install_definitions(space.api)
        with contextlib.suppress(Exception):
            space.api.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
        with all_running(plane) as programs:
            for name in STAYING:
                space.create("InferenceService", make_service(name, autoscaling=AUTOSCALING))
            for name in STAYING:
                space.wait_observed(name)
            cycles, first = Cycles(space, programs.url), max(1, count // 10)
            cycles.run(range(first))
            before = _read_at_rest(programs)
            cycles.run(range(first, count))
            return before, _read_at_rest(programs)


def _read_at_rest(programs: Programs) -> dict[str, Held]:
    time.sleep(10)
    return programs.read()


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench cycles", description=__doc__)
    parser.add_argument("--cycles", type=int, default=2000, help="how many services come and go (default: 2000)")
    given = parser.parse_args(argv)
    began = time.monotonic()
    before, after = measure(given.cycles)
    missed = [name for name in before if _has_grown(name, before[name], after[name])]
    print("| program | MiB before | MiB after | files | threads | series |\n| --- | --- | --- | --- | --- | --- |")
    for name, first in before.items():
        last = after[name]
        counts = [f"{getattr(first, each)} -> {getattr(last, each)}" for each in ("files", "threads", "series")]
        print(f"| {name} | {first.mib} | {last.mib} | {' | '.join(counts)} |")
    result = {"cycles": given.cycles, "seconds": round(time.monotonic() - began), "missed": missed}
    for what, held in (("before", before), ("after", after)):
        result[what] = {name: asdict(each) for name, each in held.items()}
    print(json.dumps(result))
    return 1 if missed else 0


def _has_grown(name: str, before: Held, after: Held) -> bool:
    more = (after.files - before.files, after.threads - before.threads, after.series - before.series)
    return after.mib - before.mib > BARS_MIB[name] or max(more) > _MOST_MORE
