"""Measures the cost of the gateway, the metrics server and kubectl's commands with many services.

Used by `reconcile`.
"""

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.gateway.cluster import make_endpoint, make_slice, own_address, publish_gateway
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import VALUES, register, running_server, write_serving_certificate
from tests.operator.stage import Space, wait_until

from conveyor_api.names import SYSTEM_NAMESPACE
from conveyor_bench.processes import resident_mib
from conveyor_load.percentiles import percentile
from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.tools import binary

GATEWAYS = 3
_METRICS = ("inference_in_flight", "inference_queue_depth")
_HPA_SECONDS = 15.0  # between two evaluations of an HPA
_HPA_WORKERS = 5  # of the real controller
_ENDPOINTS = 50
_ADMIN_PORT = 9
_TICKS = 100.0  # clock ticks in a second; /proc counts processor time in ticks


def measure_gateway(kubeconfig: Path, members: Sequence[tuple[Space, str]]) -> dict[str, float]:
    """Measure the seconds until a gateway routes, its memory, and its processor time for one more endpoint."""
    began = time.monotonic()
    with GatewayProcess(kubeconfig) as gateway:
        ready, pid = time.monotonic() - began, gateway.process.pid
        time.sleep(1)
        before = processor_seconds(pid)
        for space, name in members[:_ENDPOINTS]:
            piece = make_slice(f"{name}-more", space.namespace, name, _ADMIN_PORT, make_endpoint(own_address()))
            space.api.create(f"/apis/discovery.k8s.io/v1/namespaces/{space.namespace}/endpointslices", piece)
        time.sleep(1)
        return {
            "gateway_ready_seconds": ready,
            "gateway_rss_mib": resident_mib(pid),
            "gateway_endpoint_ms": 1000 * (processor_seconds(pid) - before) / min(_ENDPOINTS, len(members)),
        }


def measure_metrics(plane: ControlPlane, members: Sequence[tuple[Space, str]]) -> dict[str, float]:
    """Measure the metrics server. Two metrics of each service are read in an HPA's period, through the API server."""
    api = Api(plane.kubeconfig)
    with contextlib.suppress(Exception):
        api.create("/api/v1/namespaces", {"metadata": {"name": SYSTEM_NAMESPACE}})
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--host", "", "--drain-delay-seconds", "0")
        for number in range(GATEWAYS):
            gateway = stack.enter_context(GatewayProcess(plane.kubeconfig, *flags))
            publish_gateway(api, SYSTEM_NAMESPACE, f"gateway-{number}", gateway.admin_port)
        authority = Authority(folder, "metrics-authority")
        write_serving_certificate(authority, folder)
        process, port, _ = stack.enter_context(running_server(plane, folder))
        register(api, port, authority)
        questions = [
            VALUES.format(version="v1beta2", namespace=space.namespace, name=name, metric=metric)
            for space, name in members
            for metric in _METRICS
        ]
        wait_until("the first value", lambda: api.reachable(questions[0]), 60)
        before, took = processor_seconds(process.pid), _query(api, questions, _HPA_SECONDS)
        return {
            "metrics_p99_seconds": percentile(took, 99),
            "metrics_questions": len(took),
            "metrics_core_share": (processor_seconds(process.pid) - before) / _HPA_SECONDS,
            "metrics_rss_mib": resident_mib(process.pid),
        }


def _query(api: Api, questions: Sequence[str], seconds: float) -> list[float]:
    """Send the requests evenly over the seconds, or as fast as possible if that is slower. Returns their durations."""
    began, local = time.monotonic(), threading.Lock()
    took: list[float] = []

    def query(number: int) -> None:
        time.sleep(max(0.0, began + seconds * number / len(questions) - time.monotonic()))
        start = time.monotonic()
        api.get(questions[number])
        with local:
            took.append(time.monotonic() - start)

    with ThreadPoolExecutor(_HPA_WORKERS) as pool:
        list(pool.map(query, range(len(questions))))
    return took


def processor_seconds(pid: int) -> float:
    """Return the processor time of the process in user and system mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def measure_commands(kubeconfig: Path, members: Sequence[tuple[Space, str]]) -> dict[str, float]:
    """Measure how long users wait for kubectl's commands."""
    space, name = members[-1]
    plugin = (sys.executable, "-m", "conveyor_kubectl")
    commands = {
        "get": (str(binary("kubectl")), "get", "inferenceservices", "--all-namespaces"),
        "explain": (*plugin, "explain", name, "--namespace", space.namespace),
        "check": (*plugin, "check"),
    }
    found = {}
    for what, command in commands.items():
        began = time.monotonic()
        # `check` fails, because no chart is installed, but only after it has made its calls.
        subprocess.run([*command, "--kubeconfig", str(kubeconfig)], stdout=subprocess.DEVNULL, check=what != "check")
        found[f"kubectl_{what}_seconds"] = time.monotonic() - began
    return found
