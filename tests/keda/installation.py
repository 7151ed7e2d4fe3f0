"""Installs KEDA on a control plane: its definitions, its three programs as processes, its API and its webhook.

Its own manifests do the same with pods and Services. No DNS is here, so what it asks at a name in the cluster goes
through a proxy of this file to the metrics server under test.
"""

import base64
import os
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from tests.metrics.aggregation import free_port
from tests.operator.stage import wait_until

from conveyor_api import names
from e2e import keda
from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.tools import binary

Json = dict[str, Any]

NAMESPACE = "keda"
EXTERNAL = "/apis/external.metrics.k8s.io/v1beta1"
_CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_SERVICE = "keda-metrics-apiserver"
_WEBHOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"


@contextmanager
def running_keda(plane: ControlPlane, folder: Path, metrics_port: int) -> Iterator[None]:
    """Run KEDA. metrics_port: the port of Conveyor's metrics server that serves HTTP without TLS."""
    api, ports = Api(plane.kubeconfig), {name: free_port() for name in (*keda.PROGRAMS, "plain")}
    authority = _write_certificates(folder)
    _define(plane, api)
    api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    with _proxy_to(metrics_port) as proxy, ExitStack() as processes:
        environment = os.environ | _build_environment(plane, proxy)
        for name, flags in _build_flags(plane, folder, ports).items():
            processes.enter_context(_process(name, flags, environment, folder))
        _register(api, ports["adapter"], authority)
        wait_until("external.metrics.k8s.io", lambda: api.reachable(EXTERNAL))
        wait_until("the webhook", lambda: _listens(ports["webhooks"]))
        api.create(_WEBHOOKS, _build_webhook(ports["webhooks"], authority))
        yield


def _build_environment(plane: ControlPlane, proxy: int) -> dict[str, str]:
    return {
        "KUBECONFIG": str(plane.kubeconfig),
        "WATCH_NAMESPACE": "",
        "POD_NAMESPACE": NAMESPACE,
        "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE,
        "HTTP_PROXY": f"http://127.0.0.1:{proxy}",
        "NO_PROXY": "127.0.0.1,localhost",
    }


def _build_flags(plane: ControlPlane, folder: Path, ports: dict[str, int]) -> dict[str, list[str]]:
    certificates, grpc = f"--cert-dir={folder}", f"127.0.0.1:{ports['operator']}"
    kubeconfigs = [f"--{use}-kubeconfig={plane.kubeconfig}" for use in ("authentication", "authorization", "lister")]
    pair = [f"--tls-cert-file={folder}/tls.crt", f"--tls-private-key-file={folder}/tls.key"]
    addresses = [f"--secure-port={ports['adapter']}", f"--port={ports['plain']}", f"--metrics-service-address={grpc}"]
    silent = ["--health-probe-bind-address=0", "--metrics-bind-address=0"]
    return {
        "operator": [certificates, f"--metrics-service-bind-address={grpc}", *silent],
        "adapter": [certificates, *pair, *addresses, *kubeconfigs],
        "webhooks": [certificates, f"--port={ports['webhooks']}", *silent],
    }


def _define(plane: ControlPlane, api: Api) -> None:
    """Apply the definitions. Returns when they are served, because KEDA's programs look only once."""
    files = (keda.fetch() / "config" / "crd" / "bases").glob("*.yaml")
    definitions = [yaml.safe_load(file.read_text()) for file in files]
    names = {body["metadata"]["name"] for body in definitions}
    for body in definitions:
        api.apply(f"{_CRDS}/{body['metadata']['name']}", body)
    command = [binary("kubectl"), "--kubeconfig", plane.kubeconfig, "api-resources", "--cached=false", "-o", "name"]

    def found() -> set[str]:
        return set(subprocess.run(command, capture_output=True, text=True).stdout.split())

    wait_until("KEDA's kinds", lambda: names <= found())


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _process(name: str, flags: list[str], environment: dict[str, str], folder: Path) -> Iterator[None]:
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([keda.FOLDER / name, *flags], env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)


def _write_certificates(folder: Path) -> Authority:
    """Write a certificate for all three programs, as KEDA's own rotation does."""
    authority = Authority(folder, "ca")
    named = ["localhost", "127.0.0.1", f"{_SERVICE}.{NAMESPACE}.svc"]
    pair = authority.issue("tls", "keda", names=named)
    assert (pair.certificate.name, pair.key.name) == ("tls.crt", "tls.key")
    return authority


def _register(api: Api, port: int, authority: Authority) -> None:
    service = {"metadata": {"name": _SERVICE}, "spec": {"type": "ExternalName", "externalName": "localhost"}}
    api.create(f"/api/v1/namespaces/{NAMESPACE}/services", service)
    body = {
        "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
        "spec": {
            "group": "external.metrics.k8s.io",
            "version": "v1beta1",
            "groupPriorityMinimum": 100,
            "versionPriority": 100,
            "caBundle": _bundle(authority),
            "service": {"name": _SERVICE, "namespace": NAMESPACE, "port": port},
        },
    }
    api.create("/apis/apiregistration.k8s.io/v1/apiservices", body)


def _build_webhook(port: int, authority: Authority) -> Json:
    """Return KEDA's own manifest with only the webhook for ScaledObjects.

    If it does not answer, objects are refused.
    """
    manifest = keda.fetch() / "config" / "webhooks" / "validation_webhooks.yaml"
    body = next(each for each in yaml.safe_load_all(manifest.read_text()) if each)
    (webhook,) = (each for each in body["webhooks"] if each["name"] == "vscaledobject.kb.io")
    url = f"https://127.0.0.1:{port}{webhook['clientConfig']['service']['path']}"
    webhook |= {"clientConfig": {"url": url, "caBundle": _bundle(authority)}, "failurePolicy": "Fail"}
    return dict(body) | {"webhooks": [webhook]}


def _bundle(authority: Authority) -> str:
    return base64.b64encode(authority.certificate.read_bytes()).decode()


@contextmanager
def _proxy_to(port: int) -> Iterator[int]:
    """Run a proxy that knows only one host, the Service of the metrics server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            assert f"http://{url.netloc}" == names.metrics_url(), self.path
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(f"http://127.0.0.1:{port}{url.path}?{url.query}", timeout=20) as answer:
                    status, content = answer.status, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    status, content = error.code, error.read()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        yield int(server.server_address[1])
        server.shutdown()
