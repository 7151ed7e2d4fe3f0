"""Two Envoys as the sidecars of a mesh with strict mutual TLS, configured as Istio configures them.

Istio gives a sidecar for each port of the cluster's Services a table of virtual hosts, one for each Service, by the
header `Host`. A request with another `Host` goes on unencrypted, and a sidecar that accepts mutual TLS only closes such
a connection. No kernel redirects connections here: programs connect to their sidecar's port, and each Service has one
pod, which the sidecar knows.
"""

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gateway.cluster import own_address
from tests.metrics.aggregation import free_port
from tests.operator.stage import wait_until

from e2e.cluster.certificates import Authority

Json = dict[str, Any]
_TYPES = "type.googleapis.com/envoy"
_TLS = f"{_TYPES}.extensions.transport_sockets.tls.v3"


@dataclass(frozen=True, slots=True)
class Sidecars:
    """outbound: the port at which a program reaches the Service through both sidecars. inbound: the pod's sidecar's."""

    outbound: int
    inbound: int


@contextmanager
def sidecars(authority: Authority, folder: Path, service: str, namespace: str, port: int) -> Iterator[Sidecars]:
    """Run the sidecars of a client and of the Service's only pod, whose program listens on `port`."""
    folder.mkdir()
    found = Sidecars(free_port(), free_port())
    fqdn = f"{service}.{namespace}.svc.cluster.local"
    pair = authority.issue(fqdn, fqdn, names=[fqdn])
    chain = {"certificate_chain": _file(pair.certificate), "private_key": _file(pair.key)}
    common = {"tls_certificates": [chain], "validation_context": {"trusted_ca": _file(authority.certificate)}}
    strict = _tls("DownstreamTlsContext", common_tls_context=common, require_client_certificate=True)
    mutual = _tls("UpstreamTlsContext", common_tls_context=common, sni=fqdn)
    domains = [fqdn, f"{service}.{namespace}.svc", f"{service}.{namespace}"]
    of_service = {"name": fqdn, "domains": domains, "routes": [_route("service")]}
    allow_any = {"name": "allow_any", "domains": ["*"], "routes": [_route("passthrough")]}
    own = {"name": "inbound", "domains": ["*"], "routes": [_route("program")]}
    with (
        _envoy(
            folder / "client",
            [_listener(found.outbound, [of_service, allow_any])],
            [_cluster("service", found.inbound, mutual), _cluster("passthrough", found.inbound)],
        ),
        _envoy(folder / "pod", [_listener(found.inbound, [own], strict)], [_cluster("program", port)]),
    ):
        wait_until("both sidecars", lambda: _accepts(found.outbound) and _accepts(found.inbound))
        yield found


def _accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((own_address(), port)) == 0


def _file(path: Path) -> Json:
    return {"filename": str(path)}


def _tls(kind: str, **fields: Any) -> Json:
    return {"name": "tls", "typed_config": {"@type": f"{_TLS}.{kind}", **fields}}


def _route(cluster: str) -> Json:
    """Return a route without a limit of time, as Istio's default is. Envoy's own is 15 s."""
    return {"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}


def _listener(port: int, hosts: list[Json], tls: Json | None = None) -> Json:
    router = {"@type": f"{_TYPES}.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": f"{_TYPES}.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "mesh",
        "stream_idle_timeout": "0s",
        "route_config": {"virtual_hosts": hosts, "ignore_port_in_host_matching": True},
        "http_filters": [{"name": "router", "typed_config": router}],
    }
    chain: Json = {"filters": [{"name": "http", "typed_config": manager}]}
    return {
        "address": _address(port),
        "filter_chains": [chain | ({"transport_socket": tls} if tls else {})],
    }


def _cluster(name: str, port: int, tls: Json | None = None) -> Json:
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}]
    cluster: Json = {"name": name, "load_assignment": {"cluster_name": name, "endpoints": endpoints}}
    return cluster | ({"transport_socket": tls} if tls else {})


def _address(port: int) -> Json:
    return {"socket_address": {"address": own_address(), "port_value": port}}


@contextmanager
def _envoy(folder: Path, listeners: list[Json], clusters: list[Json]) -> Iterator[None]:
    folder.mkdir()
    program = shutil.which("envoy")
    assert program, "run `make expose`, which brings Envoy"
    bootstrap = folder / "bootstrap.json"
    bootstrap.write_text(json.dumps({"static_resources": {"listeners": listeners, "clusters": clusters}}))
    with (folder / "log").open("wb") as log:
        command = [program, "-c", bootstrap, "--concurrency", "1", "--disable-hot-restart"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=60)
