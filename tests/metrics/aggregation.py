"""Runs a metrics server as a process behind the aggregation layer of a real API server, and gateways that it reads.

Used by the tests of this folder; the fixtures that start it all are in `conftest`.
"""

import base64
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from conveyor_api.names import GATEWAY_ADMIN_SERVICE, METRICS_SERVICE, METRICS_VERSIONS, SYSTEM_NAMESPACE
from conveyor_kube.gateways import ADMIN_PORT_NAME
from e2e.cluster.api import Api, ApiError, wait_until
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]

SLICES = f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/endpointslices"
VALUES = "/apis/custom.metrics.k8s.io/{version}/namespaces/{namespace}/inferenceservices.conveyor.dev/{name}/{metric}"


class DemandServer(ThreadingHTTPServer):
    """A gateway that answers only `/demand`, as the contract requires.

    `status` and `delay_seconds` make it misbehave.
    """

    def __init__(self, host: str, services: dict[str, Json]) -> None:
        super().__init__((host, 0), _DemandHandler)
        self.services = services
        self.status = 200
        self.delay_seconds = 0.0


class _DemandHandler(BaseHTTPRequestHandler):
    server: DemandServer

    def do_GET(self) -> None:
        time.sleep(self.server.delay_seconds)
        body = json.dumps({"services": self.server.services}).encode()
        with contextlib.suppress(ConnectionError):  # the metrics server does not wait for a late answer
            self.send_response(self.server.status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@dataclass
class Aggregated:
    """The API server, the process of the metrics server, and the files that it reads."""

    plane: ControlPlane
    folder: Path
    authority: Authority
    port: int
    admin_port: int
    process: subprocess.Popen[bytes]
    api: Api = field(init=False)

    def __post_init__(self) -> None:
        self.api = Api(self.plane.kubeconfig)

    def value(self, name: str, metric: str = "inference_in_flight", version: str = "v1beta2", **more: str) -> Json:
        """Return the metric's value through the API server. Raises ApiError if it refuses the request."""
        path = VALUES.format(version=version, namespace=more.get("namespace", "default"), name=name, metric=metric)
        return self.api.get(path + more.get("query", ""))

    def code(self, name: str, **more: str) -> int:
        try:
            self.value(name, **more)
        except ApiError as error:
            return error.code
        return 200

    def set_gateways(self, *servers: DemandServer, **conditions: bool) -> None:
        """Make these gateways the endpoints of their Service, and wait until the metrics server reads them."""
        addresses = [server.server_address for server in servers]
        for index, slice_name in enumerate(self._slice_names(len(addresses))):
            self.api.apply(f"{SLICES}/{slice_name}", build_slice(slice_name, [addresses[index]], **conditions))
        for item in self.api.get(SLICES)["items"]:
            if item["metadata"]["name"] not in self._slice_names(len(addresses)):
                self.api.delete(f"{SLICES}/{item['metadata']['name']}")

    def _slice_names(self, count: int) -> list[str]:
        return [f"gateway-{index}" for index in range(count)]


def build_slice(name: str, addresses: list[Any], **conditions: bool) -> Json:
    """Build an EndpointSlice with one port. Kubernetes makes one per port when gateways listen on different ports."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": GATEWAY_ADMIN_SERVICE}},
        "addressType": "IPv4",
        "ports": [{"name": ADMIN_PORT_NAME, "port": addresses[0][1], "protocol": "TCP"}],
        "endpoints": [{"addresses": [host], "conditions": conditions} for host, _ in addresses],
    }


def write_serving_certificate(authority: Authority, folder: Path, lifetime: timedelta = timedelta(days=90)) -> None:
    """Write tls.crt and tls.key as the operator writes the Secret."""
    names = [f"{METRICS_SERVICE}.{SYSTEM_NAMESPACE}.svc"]
    pair = authority.issue("new", METRICS_SERVICE, names=names, lifetime=lifetime)
    pair.certificate.rename(folder / "tls.crt")
    pair.key.rename(folder / "tls.key")


@contextlib.contextmanager
def running_server(plane: ControlPlane, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int, int]]:
    """Run `python -m conveyor_metrics` with certificates from `folder`.

    Yields the process, the HTTPS and the admin port.
    """
    port, admin_port = free_port(), free_port()
    process = start_server(plane, folder, port, admin_port)
    try:
        yield process, port, admin_port
    finally:
        stop_server(process, folder)


def start_server(plane: ControlPlane, folder: Path, port: int, admin_port: int) -> subprocess.Popen[bytes]:
    """Start the process. Its log is appended to `server.log` in the folder."""
    command = [sys.executable, "-m", "conveyor_metrics", "--host=127.0.0.1"]
    command += [f"--kubeconfig={plane.kubeconfig}", f"--certificate-folder={folder}"]
    command += [f"--https-port={port}", f"--admin-port={admin_port}"]
    with (folder / "server.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def stop_server(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 0, (folder / "server.log").read_text()


def register(api: Api, port: int, authority: Authority) -> None:
    """Register both APIServices with a Service that points to this machine. Returns when they answer."""
    service = {"metadata": {"name": METRICS_SERVICE}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    api.create(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/services", service)
    for priority, version in enumerate(reversed(METRICS_VERSIONS), start=1):
        api.create("/apis/apiregistration.k8s.io/v1/apiservices", build_api_service(version, priority, port, authority))
    for version in METRICS_VERSIONS:
        path = f"/apis/custom.metrics.k8s.io/{version}"
        wait_until(path, lambda path=path: api.reachable(path))


def build_api_service(version: str, priority: int, port: int, authority: Authority) -> Json:
    return {
        "apiVersion": "apiregistration.k8s.io/v1",
        "kind": "APIService",
        "metadata": {"name": f"{version}.custom.metrics.k8s.io"},
        "spec": {
            "group": "custom.metrics.k8s.io",
            "version": version,
            "groupPriorityMinimum": 100,
            "versionPriority": 100 * priority,
            "caBundle": base64.b64encode(authority.certificate.read_bytes()).decode(),
            "service": {"name": METRICS_SERVICE, "namespace": SYSTEM_NAMESPACE, "port": port},
        },
    }


def unregister(api: Api) -> None:
    for version in METRICS_VERSIONS:
        api.delete(f"/apis/apiregistration.k8s.io/v1/apiservices/{version}.custom.metrics.k8s.io")
    api.delete(f"/api/v1/namespaces/{SYSTEM_NAMESPACE}/services/{METRICS_SERVICE}")


def free_port() -> int:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port: int = holder.getsockname()[1]
    return port
