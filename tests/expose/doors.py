"""A door to the cluster: Contour and Envoy as two processes, configured by the objects that a test applies."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from tests.metrics.aggregation import free_port
from tests.operator.stage import wait_until

from e2e import contour
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane

Json = dict[str, Any]

GATEWAY = {"gatewayRef": {"namespace": "conveyor-system", "name": "public"}}
_DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
_LISTENER_OFFSET = 8000  # Contour listens on a Gateway listener's port plus this


class Door:
    """Listens for HTTPS on a free port of 127.0.0.1."""

    def __init__(self, plane: ControlPlane, folder: Path) -> None:
        self.port = free_port()  # the kernel gives ports above 32767
        self._plane, self._folder = plane, folder

    @property
    def listener_port(self) -> int:
        """Return the port that a Gateway's listener must have so that Envoy listens on `port`."""
        return self.port - _LISTENER_OFFSET

    @contextmanager
    def running(self, ingress_class: str, settings: Json) -> Iterator["Door"]:
        """Run a door. settings: the content of Contour's configuration file."""
        configuration, bootstrap = self._folder / "contour.yaml", self._folder / "envoy.json"
        configuration.write_text(yaml.safe_dump(settings))
        discovery = ("--xds-address=127.0.0.1", f"--xds-port={free_port()}")
        admin = f"--admin-address={self._folder / 'admin'}"
        subprocess.run([contour.PROGRAM, "bootstrap", bootstrap, *discovery, admin], check=True)
        ports = {name: free_port() for name in ("http", "health", "debug-http", "stats", "envoy-service-http")}
        flags = [
            *(f"--{name}-address=127.0.0.1" for name in (*ports, "envoy-service-https")),
            *(f"--{name}-port={port}" for name, port in ports.items()),
            *(f"--envoy-service-https-port={self.port}", f"--ingress-class-name={ingress_class}"),
            *(f"--kubeconfig={self._plane.kubeconfig}", f"--config-path={configuration}"),
            *("--insecure", "--disable-leader-election", "--watch-namespaces=conveyor-system"),
        ]
        node = ["--service-cluster", "contour", "--service-node", ingress_class, "--disable-hot-restart"]
        envoy = shutil.which("envoy")
        assert envoy, "run `make expose`, which brings Envoy"
        proxy = [envoy, "-c", bootstrap, "--concurrency", "1", *node]
        with ExitStack() as processes:
            processes.enter_context(self._process("contour", [contour.PROGRAM, "serve", *discovery, *flags]))
            processes.enter_context(self._process("envoy", proxy))
            yield self

    @contextmanager
    def _process(self, name: str, command: list[str | Path]) -> Iterator[None]:
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(timeout=60)


def install_definitions(api: Api) -> None:
    """Contour's own kinds, and the Gateway API in the version that Contour was built for."""
    files = [contour.fetch() / "examples" / file for file in ("contour/01-crds.yaml", "gateway/00-crds.yaml")]
    bodies = [body for file in files for body in yaml.safe_load_all(file.read_text()) if body]
    paths = [f"{_DEFINITIONS}/{body['metadata']['name']}" for body in bodies]
    for path, body in zip(paths, bodies, strict=True):
        api.apply(path, body)
    wait_until("the definitions", lambda: all(_is_established(api.get(path)) for path in paths))


def _is_established(definition: Json) -> bool:
    found = definition.get("status", {}).get("conditions", [])
    return any((each["type"], each["status"]) == ("Established", "True") for each in found)


def conditions(route: Json) -> str:
    """Return the conditions that Contour reports for a route, for assertions and error messages."""
    parents = (route.get("status") or {}).get("parents") or []
    return json.dumps([each["conditions"] for each in parents])
