"""Measures the operator's time, memory and calls with many InferenceServices on a real control plane.

One real operator process runs with a real etcd, API server and controller manager. The latter creates pods, which are
never run. Half of the services are autoscaled, and one in ten has no replicas. The command measures:

1. clients that create the children of an eighth of the services, without and with the operator's other calls;
2. an operator while the services are created as fast as the API server accepts them, until each service has its
   children and a status, and all pods are created;
3. an operator that starts with these services and then idles for a minute, behind a proxy that counts its calls;
4. the time from an edit of a service to its effect, while an operator starts, and then while others are edited too;
5. a gateway that starts with these services, and a metrics server with three gateways, to which the command sends the
   requests of the HPA controller;
6. kubectl's commands for many services.

Prints a table and one JSON line. Exits with 1 if an idle operator makes a call, other than to renew a watch.
"""

import argparse
import json
import re
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count as count_up
from pathlib import Path
from typing import Any

from tests.metrics.aggregation import free_port
from tests.operator.api_proxy import ApiProxy, Call
from tests.operator.stage import Space, make_service, wait_until

from conveyor_bench.control.bare import measure_bare
from conveyor_bench.control.readers import measure_commands, measure_gateway, measure_metrics
from conveyor_bench.processes import resident_mib, running
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

CHILDREN_PER_SERVICE = 7.5  # seven, and an HPA for every second service
SERVICES_PER_NAMESPACE = 50
REPLICAS = 3
COMMANDS = ("get", "explain", "check")
_EDITS_PER_SECOND = 50


class Fleet:
    """The services, in namespaces of fifty services each."""

    def __init__(self, api: Api, count: int) -> None:
        self.spaces = [Space(api, f"team-{number}") for number in range(-(-count // SERVICES_PER_NAMESPACE))]
        self.members = [(self.spaces[number // SERVICES_PER_NAMESPACE], f"service-{number}") for number in range(count)]
        for space in self.spaces:
            api.create("/api/v1/namespaces", {"metadata": {"name": space.namespace}})

    def create(self, number: int) -> None:
        space, name = self.members[number]
        space.create("InferenceService", make_service(name, **_spec(number)))

    @property
    def replicas(self) -> int:
        """The number of pods that there will be."""
        return sum(_spec(number).get("replicas", REPLICAS) for number in range(len(self.members)))

    @property
    def autoscaled(self) -> list[tuple[Space, str]]:
        return [member for number, member in enumerate(self.members) if number % 2]

    def count_pods(self) -> int:
        return sum(len(space.list("Pod")) for space in self.spaces)

    def count_done(self) -> int:
        """Return how many services have a status for their current spec. The operator writes the status last."""
        return sum(
            (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
            for space in self.spaces
            for body in space.list("InferenceService")
        )


def _spec(number: int) -> dict[str, Any]:
    if number % 2:
        return {"autoscaling": {"minReplicas": REPLICAS, "maxReplicas": 4 * REPLICAS}}
    return {"replicas": REPLICAS if number % 10 else 0}


def measure_creation(fleet: Fleet, kubeconfig: Path) -> dict[str, float]:
    count = len(fleet.members)
    with restarted(kubeconfig) as (pid, pages):
        fleet.create(0)
        wait_until("the operator is up", lambda: fleet.count_done() == 1, 120)
        idle_mib, began = resident_mib(pid), time.monotonic()
        for number in range(1, count):
            fleet.create(number)
        created = time.monotonic()
        wait_looked_at(pages, count)  # by the operator's metrics; listing all services would slow the API server
        done = time.monotonic()
        wait_until("all are reconciled", lambda: fleet.count_done() == count, 60, fleet.count_done)
        wait_until("all pods are made", lambda: fleet.count_pods() == fleet.replicas, 900, fleet.count_pods)
        wait_settled(pages)
        return {
            "create_seconds": created - began,
            "reconciled_seconds": done - began,
            "rss_empty_mib": idle_mib,
            "rss_mib": resident_mib(pid),
        }


def measure_restart(fleet: Fleet, kubeconfig: Path, folder: Path, idle_seconds: float) -> dict[str, float]:
    with ApiProxy(kubeconfig).running() as proxy:
        began = time.monotonic()
        with restarted(proxy.write_kubeconfig(folder / "kubeconfig")) as (pid, pages):
            wait_looked_at(pages, len(fleet.members))
            looked = time.monotonic()
            proxy.wait_quiet(5, 600)
            restart_calls = len(proxy.calls)
            time.sleep(idle_seconds)
            print(f"calls of the restart: {describe_calls(proxy.calls[:restart_calls])}")
            idle = proxy.calls[restart_calls:]
            print(f"calls when idle: {describe_calls(idle)}")
            per_minute = 60 / idle_seconds
            return {
                "restart_seconds": looked - began,
                "restart_calls": restart_calls,
                "idle_calls_per_minute": sum(call.verb != "watch" for call in idle) * per_minute,
                "idle_watch_renewals_per_minute": sum(call.verb == "watch" for call in idle) * per_minute,
                "restart_rss_mib": resident_mib(pid),
            }


def describe_calls(calls: Sequence[Call]) -> str:
    """Return a text with the number of calls for each verb and resource, the most frequent first."""
    counted = Counter(f"{call.verb} {call.resource}" for call in calls)
    return ", ".join(f"{count} {what}" for what, count in counted.most_common()) or "none"


def measure_edits(fleet: Fleet, kubeconfig: Path, seconds: float) -> dict[str, float]:
    """Measure the seconds from an edit of a service to the update of its child."""
    half = len(fleet.autoscaled) // 2
    edited, others = fleet.autoscaled[:half], fleet.autoscaled[half:]
    with restarted(kubeconfig) as (pid, pages):
        wait_until("it looks at services", lambda: read_metric(pages, "reconciles_total") > 0, 120)
        beside_restart, beside_edits = [], []
        turns = count_up()
        while not is_looked_at(pages, len(fleet.members)):
            beside_restart.append(time_edit(*edited[next(turns) % half], next(turns)))
        end = time.monotonic() + seconds
        with editing(others, _EDITS_PER_SECOND):
            while time.monotonic() < end:
                beside_edits.append(time_edit(*edited[next(turns) % half], next(turns)))
        return {
            "edit_beside_restart_p99_seconds": percentile(beside_restart, 99),
            "edits_beside_restart": len(beside_restart),
            "edit_beside_edits_p99_seconds": percentile(beside_edits, 99),
            "edits_beside_edits": len(beside_edits),
            "rss_after_edits_mib": resident_mib(pid),
        }


def time_edit(space: Space, name: str, number: int) -> float:
    most = 4 * REPLICAS + number % 100
    began = time.monotonic()
    space.edit(name, autoscaling={"maxReplicas": most})
    while space.need("HorizontalPodAutoscaler", f"{name}-engine")["spec"]["maxReplicas"] != most:
        time.sleep(0.02)
    return time.monotonic() - began


@contextmanager
def editing(members: Sequence[tuple[Space, str]], per_second: float) -> Iterator[None]:
    """Edit these services while the body runs, at this rate or as fast as the API server accepts edits."""
    over = threading.Event()

    def edit() -> None:
        for number in count_up():
            space, name = members[number % len(members)]
            if over.wait(1 / per_second):
                return
            space.edit(name, autoscaling={"maxReplicas": 4 * REPLICAS + number % 100})

    thread = threading.Thread(target=edit, name="edits")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def restarted(kubeconfig: Path) -> Iterator[tuple[int, str]]:
    """Start an operator. Yields its process id and the address of its pages."""
    port = free_port()
    with running("conveyor_operator", kubeconfig, f"--admin-port={port}") as process:
        yield process.pid, f"http://127.0.0.1:{port}"


def wait_looked_at(pages: str, count: int) -> None:
    wait_until("it has looked at all services", lambda: is_looked_at(pages, count), 600)


def wait_settled(pages: str) -> None:
    """Wait until there has been no reconcile for ten seconds."""
    before = -1.0
    while (now := read_metric(pages, "reconciles_total")) != before:
        before = now
        time.sleep(10)


def is_looked_at(pages: str, count: int) -> bool:
    waiting = read_metric(pages, "queue_depth") + read_metric(pages, "busy_workers")
    return read_metric(pages, "reconciles_total") >= count and waiting == 0


def read_metric(pages: str, name: str) -> float:
    """Return the sum of a metric over its labels; 0 while the operator does not answer."""
    try:
        with urllib.request.urlopen(f"{pages}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except OSError:
        return 0.0
    values = re.findall(rf"^conveyor_operator_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values))


def print_table(count: int, found: dict[str, float]) -> None:
    rows = [
        (f"{count} services created by the client", f"{found['create_seconds']:.1f} s"),
        ("all reconciled, since the first create", f"{found['reconciled_seconds']:.1f} s"),
        ("children applied per second", f"{count * CHILDREN_PER_SERVICE / found['reconciled_seconds']:.0f}"),
        ("by a client that only applies, before", f"{found['bare_children_per_second']:.0f}"),
        ("by a client with the operator's calls", f"{found['limit_children_per_second']:.0f}"),
        ("memory with one service", f"{found['rss_empty_mib']:.0f} MiB"),
        (f"memory with {count} services", f"{found['rss_mib']:.0f} MiB"),
        ("restart until all is looked at", f"{found['restart_seconds']:.1f} s"),
        ("calls of the restart", f"{found['restart_calls']:.0f}"),
        ("memory after the restart", f"{found['restart_rss_mib']:.0f} MiB"),
        ("calls per minute when idle", f"{found['idle_calls_per_minute']:.0f}"),
        ("watches renewed per minute", f"{found['idle_watch_renewals_per_minute']:.0f}"),
        ("edit to child beside a restart, P99", f"{found['edit_beside_restart_p99_seconds']:.2f} s"),
        ("edit to child beside 50 edits a second, P99", f"{found['edit_beside_edits_p99_seconds']:.2f} s"),
        ("memory after the edits", f"{found['rss_after_edits_mib']:.0f} MiB"),
        ("a gateway starts until it routes", f"{found['gateway_ready_seconds']:.1f} s"),
        ("memory of the gateway", f"{found['gateway_rss_mib']:.0f} MiB"),
        ("the gateway's time for one more endpoint", f"{found['gateway_endpoint_ms']:.1f} ms"),
        ("two metrics of each service in 15 s, P99", f"{1000 * found['metrics_p99_seconds']:.0f} ms"),
        ("memory of the metrics server", f"{found['metrics_rss_mib']:.0f} MiB"),
        *((f"kubectl {each}", f"{found[f'kubectl_{each}_seconds']:.1f} s") for each in COMMANDS),
    ]
    for what, value in rows:
        print(f"{what:<44} {value:>12}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench reconcile", description=__doc__)
    parser.add_argument("--services", type=int, default=200, help="how many InferenceServices (default: 200)")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long to watch it idle (default: 60)")
    parser.add_argument("--edit-seconds", type=float, default=30, help="how long to edit it (default: 30)")
    given = parser.parse_args(argv)
    if given.services < 8:
        parser.error("--services must be at least 8")
    # The HPA controller evaluates every 15 s, which is its default.
    with ControlPlane(hpa_sync_period_seconds=15) as plane, tempfile.TemporaryDirectory() as folder:
        api = Api(plane.kubeconfig)
        install_definitions(api)
        fleet = Fleet(api, given.services)
        found = measure_bare(api, plane.kubeconfig, [_spec(number) for number in range(given.services // 8)])
        found |= measure_creation(fleet, plane.kubeconfig)
        found |= measure_restart(fleet, plane.kubeconfig, Path(folder), given.idle_seconds)
        found |= measure_edits(fleet, plane.kubeconfig, given.edit_seconds)
        found |= measure_gateway(plane.kubeconfig, fleet.members)
        found |= measure_metrics(plane, fleet.members)
        found |= measure_commands(plane.kubeconfig, fleet.members)
    print_table(given.services, found)
    print(json.dumps({"services": given.services} | {key: round(value, 2) for key, value in found.items()}))
    return 1 if found["idle_calls_per_minute"] else 0
