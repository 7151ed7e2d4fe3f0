"""Measures the console with many InferenceServices on a real control plane, without gateways.

One real console process follows the API server. The command measures its memory, the time and the processor time of a
page of the overview and of a service, and its processor time while a viewer's page changes by itself and ten services
change their status in each second. Exits with 1 if the console uses more than 100 MiB. The last line is a JSON object.
"""

import argparse
import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

from tests.console.process import ConsoleProcess, make_reader
from tests.console.test_console import READY, set_ready, streaming
from tests.gateway.cluster import Cluster

from conveyor_bench.processes import cpu_seconds, peak_mib
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions

MEMORY_BAR_MIB = 100.0
NAMESPACE = "default"
EDITS_PER_SECOND = 10


def create_services(cluster: Cluster, number: int) -> list[str]:
    """Create services whose statuses say that they are ready, and return their names."""

    def create(name: str) -> str:
        cluster.apply_service(name)
        set_ready(cluster, name, READY, readyReplicas=1, desiredReplicas=1)
        return name

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(create, (f"service-{each:04}" for each in range(number))))


def measure_page(console: ConsoleProcess, token: str, path: str, times: int) -> dict[str, float]:
    """Return the milliseconds that a page takes for its reader, and of the console's processor time."""
    seconds, before = [], cpu_seconds(console.process.pid)
    for _ in range(times):
        began = time.perf_counter()
        assert console.get(path, token).status == 200
        seconds.append(time.perf_counter() - began)
    used = cpu_seconds(console.process.pid) - before
    return {
        "p50_ms": percentile(seconds, 50) * 1e3,
        "p95_ms": percentile(seconds, 95) * 1e3,
        "cpu_ms": used / times * 1e3,
    }


def measure_changes(
    console: ConsoleProcess, token: str, cluster: Cluster, services: list[str], seconds: float
) -> dict[str, float]:
    """Return the console's part of a core and the messages that a viewer gets, while services change their status."""
    messages, ended = count(), threading.Event()

    def view() -> None:
        with streaming(console, token) as events:
            for _ in events:
                next(messages)
                if ended.is_set():
                    return

    viewer = threading.Thread(target=view)
    viewer.start()
    began, before = time.perf_counter(), cpu_seconds(console.process.pid)
    edits = 0
    while (passed := time.perf_counter() - began) < seconds:
        name = services[edits % len(services)]
        set_ready(cluster, name, READY, readyReplicas=1 + edits % 2, desiredReplicas=2)
        edits += 1
        time.sleep(max(0.0, edits / EDITS_PER_SECOND - passed))
    used = cpu_seconds(console.process.pid) - before
    ended.set()
    viewer.join()
    return {"cores": used / passed, "edits_per_second": edits / passed, "messages": next(messages)}


def run(options: argparse.Namespace) -> dict[str, Any]:
    with ControlPlane() as control_plane:
        api = Api(control_plane.kubeconfig)
        install_definitions(api)
        cluster = Cluster(api, NAMESPACE)
        services = create_services(cluster, options.services)
        token = make_reader(api, NAMESPACE)
        with ConsoleProcess(control_plane.kubeconfig, "conveyor-system") as console:
            console.wait_for(f"{options.services:,} services", token)
            measured = partial(measure_page, console, token, times=options.pages)
            pages = {"overview": measured("/"), "service": measured(f"/services/{NAMESPACE}/{services[0]}")}
            changes = measure_changes(console, token, cluster, services, options.seconds)
            memory = peak_mib(console.process.pid)
    return {"services": options.services, "pages": pages, "changes": changes, "memory_mib": memory}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m conveyor_bench console", description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=100, help="how often each page is read")
    parser.add_argument("--seconds", type=float, default=30.0, help="of the changes")
    result = run(parser.parse_args(argv))
    for name, page in result["pages"].items():
        print(f"a page of {name}: " + ", ".join(f"{key} {value:.1f}" for key, value in page.items()))
    changes = result["changes"]
    print(
        f"with {changes['edits_per_second']:.1f} changes a second: {changes['cores']:.1%} of a core; at most "
        f"{result['memory_mib']:.0f} MiB of memory; load average {os.getloadavg()[0]:.1f}"
    )
    is_met = result["memory_mib"] <= MEMORY_BAR_MIB
    print(json.dumps({"benchmark": "console", **result, "bars_met": {"memory": is_met}}))
    return 0 if is_met else 1
