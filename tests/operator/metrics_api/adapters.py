"""Aggregated APIs on 127.0.0.1 for tests of `metrics_api`: a fake of Conveyor's own, and that of another owner.

The API server reaches them through a Service of type ExternalName (see `e2e.cluster.control_plane`).
"""

import base64
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.operator.stage import Json, Space, wait_until

from conveyor_operator.metrics_api.certificates import Serving
from conveyor_operator.metrics_api.registration import API_SERVICES
from e2e.cluster.certificates import Authority
from e2e.other_adapter import build_hpa, build_server

API_SERVICES_PATH = "/apis/apiregistration.k8s.io/v1/apiservices"
OTHER = "other-adapter"


class MetricsServer:
    """A fake of Conveyor's metrics server.

    It serves empty versions of the group, with the certificate that it got last.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _EmptyVersions)
        self._server.daemon_threads = False  # so that closing waits for them
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self.answered = 0

    def serve(self, serving: Serving) -> None:
        pair = self._folder / "pair.pem"
        pair.write_bytes(serving.certificate + serving.key)
        self._context.load_cert_chain(pair)
        if not self._thread.is_alive():
            self._server.socket = self._context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._server.metrics_server = self  # type: ignore[attr-defined]
            self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _EmptyVersions(BaseHTTPRequestHandler):
    timeout = 2

    def do_GET(self) -> None:
        version = self.path.removeprefix("/apis/").partition("?")[0]
        body = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": []}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
        self.server.metrics_server.answered += 1  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        pass


class OtherAdapter:
    """Another owner of v1beta1, with its own Deployment, which an HPA scales with its metrics."""

    def __init__(self, space: Space, port: int, authority: Authority) -> None:
        self.space = space
        self._api_service: Json = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": API_SERVICES[1]},
            "spec": {
                "group": "custom.metrics.k8s.io",
                "version": "v1beta1",
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "caBundle": base64.b64encode(authority.certificate.read_bytes()).decode(),
                "service": {"name": OTHER, "namespace": space.namespace, "port": port},
            },
        }
        space.create("Service", build_external_service(OTHER, port))
        space.create("Deployment", build_deployment("theirs"))
        space.create("HorizontalPodAutoscaler", build_hpa("theirs"))

    def register(self) -> None:
        """Register the adapter as `kubectl apply` of its manifest does, whoever owned the APIService before."""
        self.space.api.apply(f"{API_SERVICES_PATH}/{API_SERVICES[1]}", self._api_service)

    def unregister(self) -> None:
        self.space.api.delete(f"{API_SERVICES_PATH}/{API_SERVICES[1]}")

    def wait_scaled(self) -> None:
        """Wait until its HPA has read its metric from now on."""
        self.space.patch("Deployment", "theirs", {"spec": {"replicas": 1}})

        def scaled() -> bool:
            return bool(self.space.need("Deployment", "theirs")["spec"]["replicas"] == 3)

        wait_until("its HPA scales", scaled, 60, lambda: self.space.need("HorizontalPodAutoscaler", "theirs")["status"])


@contextmanager
def other_adapter(space: Space, folder: Path) -> Iterator[OtherAdapter]:
    authority = Authority(folder, "other-authority")
    pair = authority.issue("other", OTHER, names=[f"{OTHER}.{space.namespace}.svc"])
    server = build_server("127.0.0.1", 0, str(pair.certificate), str(pair.key))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield OtherAdapter(space, server.server_port, authority)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_external_service(name: str, port: int) -> Json:
    ports = [{"name": "https", "port": port}]
    spec = {"type": "ExternalName", "externalName": "localhost", "ports": ports}
    return {"metadata": {"name": name}, "spec": spec}


def build_deployment(name: str, replicas: int = 1) -> Json:
    labels = {"app": name}
    container = {"name": "engine", "image": "example/server:1"}
    return {
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }


def registered(space: Space) -> list[Any]:
    """Return the Service that each APIService of the group names. Conveyor's are `conveyor-metrics`."""
    found = {
        item["metadata"]["name"]: item["spec"].get("service") for item in space.api.get(API_SERVICES_PATH)["items"]
    }
    return [found[name]["name"] if name in found else None for name in API_SERVICES]
