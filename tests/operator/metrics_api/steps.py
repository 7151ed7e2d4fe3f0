"""Common steps of these tests: the chart's objects, a running keeper, and the two APIServices."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from cryptography import x509
from tests.operator.kubelet import Kubelet, ready
from tests.operator.metrics_api.adapters import (
    API_SERVICES_PATH,
    MetricsServer,
    build_deployment,
    build_external_service,
    registered,
)
from tests.operator.stage import Json, Space, Stage, wait_until

from conveyor_api.names import METRICS_API_ROLE, METRICS_SERVICE, METRICS_TLS_SECRET
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.certificates import RENEW_AFTER, Serving
from conveyor_operator.metrics_api.keeper import MetricsApiKeeper
from conveyor_operator.metrics_api.registration import API_SERVICES
from conveyor_operator.metrics_api.server import read_serving

SECRET = METRICS_TLS_SECRET
ROLE_PATH = f"/apis/rbac.authorization.k8s.io/v1/clusterroles/{METRICS_API_ROLE}"
AGED = -(RENEW_AFTER + timedelta(minutes=1))
OURS, NOBODY = [METRICS_SERVICE, METRICS_SERVICE], [None, None]
THEIRS = [None, "other-adapter"]


class Clock:
    """The real clock, which the test sets ahead or back.

    The API server does not accept certificates from the far future.
    """

    def __init__(self, ahead: timedelta = timedelta()) -> None:
        self.ahead = ahead

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


@contextmanager
def installation(space: Space, server: MetricsServer) -> Iterator[None]:
    space.create("Secret", {"metadata": {"name": SECRET}, "type": "Opaque"})
    space.create("Service", build_external_service(METRICS_SERVICE, server.port))
    space.create("Deployment", build_deployment(METRICS_SERVICE))
    with Kubelet(space, ready):
        yield


@asynccontextmanager
async def keeping(
    stage: Stage, clock: Callable[[], datetime], domain: str = "cluster.local", namespace: str = ""
) -> AsyncIterator[MetricsApiKeeper]:
    metrics = Metrics()
    async with Cluster(await load_configuration(stage.settings.kubeconfig), metrics) as cluster:
        namespace = namespace or stage.space.namespace
        keeper = MetricsApiKeeper(cluster, metrics, namespace, domain, lambda: None, clock)
        task = asyncio.create_task(keeper.run())
        yield keeper
        assert not task.done(), task.exception()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serving_of(space: Space) -> Serving | None:
    return read_serving(space.get("Secret", SECRET) or {})


def api_services(space: Space) -> list[Json]:
    return [space.api.get(f"{API_SERVICES_PATH}/{name}") for name in API_SERVICES]


def bundles(space: Space) -> list[bytes]:
    return [base64.b64decode(found["spec"].get("caBundle", "")) for found in api_services(space)]


def authorities(bundle: bytes) -> int:
    return len(x509.load_pem_x509_certificates(bundle)) if bundle else 0


def available(space: Space) -> list[Json]:
    conditions = [c for found in api_services(space) for c in found.get("status", {}).get("conditions", ())]
    return [c for c in conditions if c["type"] == "Available"]


def is_available(space: Space) -> bool:
    return registered(space) == OURS and [c["status"] for c in available(space)] == ["True", "True"]


def look_again(space: Space) -> None:
    """Change the Secret, which the keeper notices. It does not notice that the clock was set."""
    space.patch("Secret", SECRET, {"metadata": {"annotations": {"changed": str(datetime.now(UTC))}}})


async def until(what: str, probe: Callable[[], Any], seconds: float = 30, show: Callable[[], Any] = str) -> Any:
    return await asyncio.to_thread(wait_until, what, probe, seconds, show)


async def until_registered(space: Space, server: MetricsServer) -> Serving:
    """Wait until the certificate is made, served, and trusted by the API server."""
    serving: Serving = await until("a pair", lambda: serving_of(space))
    server.serve(serving)
    await until("registered and trusted", lambda: is_available(space), 60, lambda: registered(space))
    return serving


async def until_queried_again(space: Space, server: MetricsServer) -> None:
    """Wait until the API server has read both versions again, over a connection that it trusts."""
    for name in API_SERVICES:
        before = server.answered
        patch = {"metadata": {"annotations": {"looked": str(datetime.now(UTC))}}}
        space.api.call("PATCH", f"{API_SERVICES_PATH}/{name}", patch, "application/merge-patch+json")
        await until("an answer", lambda before=before: server.answered > before, 60)


async def until_namespace_ends(space: Space) -> None:
    """Wait until a new namespace can be deleted, which is impossible while an APIService has no server."""
    name = f"short-lived-{uuid4().hex[:6]}"
    space.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
    space.api.delete(f"/api/v1/namespaces/{name}")
    await until("its end", lambda: not space.api.reachable(f"/api/v1/namespaces/{name}"), 60)
