"""Applies the manifests of docs/expose.md to a real API server with Contour and Envoy. Run by `make expose`.

Behind them is a real gateway, which Contour finds by the chart's Service. No kubelet is here that would fill the
Service's EndpointSlice with the gateway's pod: the gateway is a process, and the test writes its slice.
"""

import asyncio
import re
import socket
import ssl
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from tests.chart.installation import find, path_of, render
from tests.expose.doors import GATEWAY, Door, install_definitions
from tests.gateway.cluster import make_endpoint, own_address
from tests.gateway.conftest import cluster, stack
from tests.gateway.process import GatewayProcess
from tests.gateway.stack import Stack

from conveyor_api.names import SYSTEM_NAMESPACE
from e2e.cluster.api import Api
from e2e.cluster.certificates import Authority
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.paths import REPOSITORY
from e2e.cluster.tools import search_path

__all__ = ["cluster", "stack"]

Json = dict[str, Any]
HOST = "models.example.com"
PAGE = (REPOSITORY / "docs" / "expose.md").read_text()


@dataclass(frozen=True)
class Exposed:
    """A door for one kind of route, and clients that trust its certificate authority."""

    kind: str
    door: Door
    tls: ssl.SSLContext
    api: Api

    def url(self, stack: Stack) -> str:
        """The base URL of the stack's service for clients outside the cluster."""
        return f"https://{HOST}:{self.door.port}/{stack.key}/v1"

    def client(self, tls: ssl.SSLContext | None = None) -> httpx.AsyncClient:
        return httpx.AsyncClient(verify=tls or self.tls, timeout=120)

    async def publish(self, stack: Stack, *objects: Json) -> None:
        """Apply the page's manifests, or others, for the stack's namespace. Returns when Envoy serves the route."""
        for item in objects or manifests(f"kind: {self.kind}\n"):
            await asyncio.to_thread(self._apply, item, stack.cluster.namespace)

    def _apply(self, item: Json, namespace: str) -> None:
        body: Json = yaml.safe_load(yaml.safe_dump(item).replace("/team-a", f"/{namespace}"))
        for listener in body["spec"].get("listeners", ()):
            listener["port"] = self.door.listener_port
        self.api.apply(path_of(self.api, body), body)

    async def withdraw(self, stack: Stack) -> None:
        """Delete the route. Returns when Envoy no longer serves it."""
        (path,) = {path_of(self.api, item) for item in manifests(f"kind: {self.kind}\n") if item["kind"] == self.kind}
        await asyncio.to_thread(self.api.delete, path)
        await self._wait(stack, {}, is_published=False)

    async def wait_published(self, stack: Stack, **headers: str) -> None:
        """Wait until Envoy forwards requests for this service."""
        await self._wait(stack, headers, is_published=True)

    async def _wait(self, stack: Stack, headers: dict[str, str], *, is_published: bool) -> None:
        async with asyncio.timeout(60), self.client() as client:
            url = f"{self.url(stack)}/models"
            while await self._answers(client, url, headers) != is_published:  # noqa: ASYNC110  Envoy tells nobody
                await asyncio.sleep(0.2)

    async def _answers(self, client: httpx.AsyncClient, url: str, headers: dict[str, str]) -> bool:
        try:
            return (await client.get(url, headers=headers)).status_code == 200
        except httpx.TransportError:
            return False


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def manifests(word: str) -> list[Json]:
    """Return the objects in the page's first block that contains this text."""
    return list(yaml.safe_load_all(next(block for block in blocks("yaml") if word in block)))


def contour_settings() -> Json:
    settings: Json = manifests("stream-idle-timeout")[0]
    return settings


@pytest.fixture(autouse=True)
def names_lead_to_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the page's host names resolve to the door, as public DNS would."""
    resolve = socket.getaddrinfo

    def lookup(host: Any, *arguments: Any, **options: Any) -> Any:
        return resolve("127.0.0.1" if host in (HOST, HOST.encode()) else host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.fixture(scope="session")
def authority(crd: Api, kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Creates the page's Secret with the page's command, from a certificate of this test's authority."""
    install_definitions(crd)
    folder = tmp_path_factory.mktemp("authority")
    authority = Authority(folder, "authority")
    authority.issue("models", HOST, names=[HOST])
    environment = {"HOME": str(folder), "KUBECONFIG": str(kubeconfig), "PATH": search_path()}
    subprocess.run(["bash", "-ec", blocks("sh")[0]], cwd=folder, env=environment, check=True, timeout=60)
    return authority


@pytest.fixture(scope="session")
def gateway(crd: Api, kubeconfig: Path, authority: Authority) -> Iterator[GatewayProcess]:
    """A gateway that Contour finds behind the chart's Service."""
    service = find(render(), "Service", "conveyor-gateway")
    crd.apply(path_of(crd, service), service)
    trusted = f"127.0.0.0/8,{own_address()}/32"
    flags = ("--host", "", "--trusted-proxies", trusted, "--client-header", "X-Client")
    with GatewayProcess(kubeconfig, *flags) as gateway:
        labels = {"kubernetes.io/service-name": "conveyor-gateway"}
        body = {
            "metadata": {"name": "conveyor-gateway-process", "labels": labels},
            "addressType": "IPv4",
            "ports": [{"name": service["spec"]["ports"][0]["name"], "port": gateway.port, "protocol": "TCP"}],
            "endpoints": [make_endpoint(own_address())],
        }
        crd.create(f"/apis/discovery.k8s.io/v1/namespaces/{SYSTEM_NAMESPACE}/endpointslices", body)
        yield gateway


@pytest.fixture(scope="session", params=["Ingress", "HTTPRoute"])
def exposed(
    request: pytest.FixtureRequest, crd: Api, control_plane: ControlPlane, authority: Authority,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Exposed]:  # fmt: skip
    """A door for each kind of route, with the page's settings for Contour."""
    is_ingress = request.param == "Ingress"
    settings = contour_settings() | ({} if is_ingress else {"gateway": GATEWAY})
    crd.apply("/apis/gateway.networking.k8s.io/v1/gatewayclasses/contour", gateway_class())
    with Door(control_plane, tmp_path_factory.mktemp("door")).running(
        "contour" if is_ingress else "none", settings
    ) as door:
        yield Exposed(request.param, door, trusting(authority), crd)


@pytest.fixture
async def published(exposed: Exposed, stack: Stack) -> Stack:
    """The stack's service, published with the page's manifests."""
    await exposed.publish(stack)
    await exposed.wait_published(stack)
    return stack


def gateway_class() -> Json:
    spec = {"controllerName": "projectcontour.io/gateway-controller"}
    version = "gateway.networking.k8s.io/v1"
    return {"apiVersion": version, "kind": "GatewayClass", "metadata": {"name": "contour"}, "spec": spec}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


def event(text: str) -> bytes:
    """Return an event of a completion's stream."""
    fields = '"id": "1", "object": "text_completion", "created": 1, "model": "qwen"'
    return f'data: {{{fields}, "choices": [{{"index": 0, "text": "{text}"}}]}}\n\n'.encode()
