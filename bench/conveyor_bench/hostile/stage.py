"""Runs the programs that are attacked, on the control plane of the tests."""

import contextlib
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.metrics.aggregation import (
    SLICES,
    VALUES,
    build_slice,
    free_port,
    register,
    running_server,
    write_serving_certificate,
)

from conveyor_bench.processes import running
from e2e.cluster.api import Api, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane


@contextlib.contextmanager
def running_operator(plane: ControlPlane) -> Iterator[tuple[int, int]]:
    """Run an operator. Yields its process id and its admin port, once it listens."""
    port = free_port()
    flags = (f"--admin-port={port}", "--metrics-api=false")
    with running("conveyor_operator", plane.kubeconfig, *flags, log=subprocess.DEVNULL) as process:
        wait_until("the operator", partial(_listens, port))
        yield process.pid, port


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


class MetricsServer(NamedTuple):
    """The metrics server's process and ports, and the authority that signed its certificate."""

    pid: int
    https_port: int
    admin_port: int
    authority: Authority


@contextlib.contextmanager
def running_metrics(plane: ControlPlane) -> Iterator[MetricsServer]:
    """Run a metrics server that the API server does not use yet."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        authority = Authority(folder, "authority")
        write_serving_certificate(authority, folder)
        with running_server(plane, folder) as (process, https_port, admin_port):
            yield MetricsServer(process.pid, https_port, admin_port, authority)


def serve_metrics(api: Api, server: MetricsServer, gateway: tuple[str, int], namespace: str) -> None:
    """Register the server, which reads one gateway. Returns when the namespace's service `good` has its value."""
    api.apply(f"{SLICES}/gateway", build_slice("gateway", [gateway]))
    register(api, server.https_port, server.authority)
    wait_until("the HPA's value", partial(api.reachable, value_path(namespace)))


def value_path(namespace: str) -> str:
    """Return the API server's path of the metric that an HPA reads for the namespace's service `good`."""
    return VALUES.format(version="v1beta2", namespace=namespace, name="good", metric="inference_queue_depth")
