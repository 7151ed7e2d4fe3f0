"""What the operator costs: 200 InferenceServices on a real control plane; time, memory, calls when idle.

One real operator process against a real etcd, API server and controller manager (no pods run). First life: the
services are created as fast as the API server takes them, until each has its children and a status. Second life:
an operator that starts on them, through a proxy that counts its calls; then a minute of idleness. Half of the
services are autoscaled. Prints a table and one JSON line; ends with status 1 if an idle operator makes a call.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.operator.api_proxy import ApiProxy
from tests.operator.stage import Space, make_service, wait_until

from conveyor_bench.processes import resident_mib, running
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

NAMESPACE = "default"
CHILDREN_PER_SERVICE = 7.5  # seven, and an HPA for every second one


def count_done(space: Space) -> int:
    """Services whose status speaks of their present spec; the status is written after the children."""
    return sum(
        (body.get("status") or {}).get("observedGeneration") == body["metadata"]["generation"]
        for body in space.list("InferenceService")
    )


def measure_creation(space: Space, kubeconfig: Path, count: int) -> dict[str, float]:
    with running("conveyor_operator", kubeconfig) as process:
        space.create("InferenceService", make_service("first"))
        wait_until("the operator is up", lambda: count_done(space) == 1, 120)
        idle_mib, began = resident_mib(process.pid), time.monotonic()
        for number in range(count - 1):
            autoscaling = {"autoscaling": {"maxReplicas": 4}} if number % 2 else {}
            space.create("InferenceService", make_service(f"service-{number}", **autoscaling))
        created = time.monotonic()
        wait_until("all are reconciled", lambda: count_done(space) == count, 600, lambda: count_done(space))
        done = time.monotonic()
        return {
            "create_seconds": created - began,
            "reconciled_seconds": done - began,
            "rss_empty_mib": idle_mib,
            "rss_mib": resident_mib(process.pid),
        }


def measure_restart(kubeconfig: Path, folder: Path, idle_seconds: float) -> dict[str, float]:
    with ApiProxy(kubeconfig).running() as proxy:
        began = time.monotonic()
        with running("conveyor_operator", proxy.write_kubeconfig(folder / "kubeconfig")) as process:
            wait_until("it looks at all children", proxy.writes, 120)
            proxy.wait_quiet(5, 600)
            settled = time.monotonic() - 5
            restart_calls = len(proxy.calls)
            time.sleep(idle_seconds)
            idle = proxy.calls[restart_calls:]
            per_minute = 60 / idle_seconds
            return {
                "restart_seconds": settled - began,
                "restart_calls": restart_calls,
                "idle_calls_per_minute": sum(call.verb != "watch" for call in idle) * per_minute,
                "idle_watch_renewals_per_minute": sum(call.verb == "watch" for call in idle) * per_minute,
                "restart_rss_mib": resident_mib(process.pid),
            }


def print_table(count: int, found: dict[str, float]) -> None:
    rows = [
        (f"{count} services created by the client", f"{found['create_seconds']:.1f} s"),
        ("all reconciled, since the first create", f"{found['reconciled_seconds']:.1f} s"),
        ("children applied per second", f"{count * CHILDREN_PER_SERVICE / found['reconciled_seconds']:.0f}"),
        ("memory with one service", f"{found['rss_empty_mib']:.0f} MiB"),
        (f"memory with {count} services", f"{found['rss_mib']:.0f} MiB"),
        ("restart until all is looked at", f"{found['restart_seconds']:.1f} s"),
        ("calls of the restart", f"{found['restart_calls']:.0f}"),
        ("memory after the restart", f"{found['restart_rss_mib']:.0f} MiB"),
        ("calls per minute when idle", f"{found['idle_calls_per_minute']:.0f}"),
        ("watches renewed per minute", f"{found['idle_watch_renewals_per_minute']:.0f}"),
    ]
    for what, value in rows:
        print(f"{what:<40} {value:>12}")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench reconcile", description=__doc__)
    parser.add_argument("--services", type=int, default=200, help="how many InferenceServices (default: 200)")
    parser.add_argument("--idle-seconds", type=float, default=60, help="how long to watch it idle (default: 60)")
    given = parser.parse_args(argv)
    # The HPA looks every 15 s, as it does by default.
    with ControlPlane(hpa_sync_period_seconds=15) as plane, tempfile.TemporaryDirectory() as folder:
        api = Api(plane.kubeconfig)
        install_definitions(api)
        space = Space(api, NAMESPACE)
        found = measure_creation(space, plane.kubeconfig, given.services)
        found |= measure_restart(plane.kubeconfig, Path(folder), given.idle_seconds)
    print_table(given.services, found)
    print(json.dumps({"services": given.services} | {key: round(value, 1) for key, value in found.items()}))
    return 1 if found["idle_calls_per_minute"] else 0
