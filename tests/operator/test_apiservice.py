"""The metrics server's certificate on a real API server: filled in, trusted, rotated by a clock of ours, left alone."""

import asyncio
import base64
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from tests.operator.stage import Json, Space, Stage, wait_until

from conveyor_operator.apiservice import API_SERVICES, MetricsApiKeeper, read_serving
from conveyor_operator.certificates import KEEP_OLD_AUTHORITY, RENEW_AFTER, Serving
from conveyor_operator.cluster import Cluster, load_configuration
from conveyor_operator.metrics import Metrics
from conveyor_operator.scaling import MetricsApi

SECRET = "conveyor-metrics-tls"
PATH = "/apis/apiregistration.k8s.io/v1/apiservices"


AGED = -(RENEW_AFTER + timedelta(minutes=1))


class Clock:
    """The real one, set ahead or back by the test. What is issued far ahead the API server would not accept."""

    def __init__(self, ahead: timedelta = timedelta()) -> None:
        self.ahead = ahead

    def __call__(self) -> datetime:
        return datetime.now(UTC) + self.ahead


class MetricsServer:
    """Answers discovery over TLS on 127.0.0.1 with whatever pair it was given last."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

        class Handler(BaseHTTPRequestHandler):
            timeout = 2

            def do_GET(self) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False  # so that closing waits for them
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def serve(self, serving: Serving) -> None:
        pair = self._folder / "pair.pem"
        pair.write_bytes(serving.certificate + serving.key)
        self._context.load_cert_chain(pair)
        if not self._thread.is_alive():
            self._server.socket = self._context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetricsServer]:
    server = MetricsServer(tmp_path)
    yield server
    server.close()


@pytest.fixture
def installed(space: Space, server: MetricsServer) -> Iterator[Space]:
    """What the chart makes: an empty Secret, the Service, and two APIServices without a caBundle."""
    space.create("Secret", {"metadata": {"name": SECRET}, "type": "Opaque"})
    external = {"type": "ExternalName", "externalName": "localhost"}
    space.create("Service", {"metadata": {"name": "conveyor-metrics"}, "spec": external})
    make_api_services(space, {"name": "conveyor-metrics", "namespace": space.namespace, "port": server.port})
    yield space
    for name in API_SERVICES:
        space.api.delete(f"{PATH}/{name}")


def make_api_services(space: Space, service: Json, names: tuple[str, ...] = API_SERVICES) -> None:
    for name in names:
        version, _, group = name.partition(".")
        spec = {"group": group, "version": version, "groupPriorityMinimum": 100, "versionPriority": 100}
        space.api.create(PATH, {"metadata": {"name": name}, "spec": spec | {"service": service}})


@asynccontextmanager
async def keeping(
    stage: Stage, clock: Callable[[], datetime], domain: str = "cluster.local"
) -> AsyncIterator[MetricsApiKeeper]:
    metrics = Metrics()
    async with Cluster(await load_configuration(stage.settings.kubeconfig), metrics) as cluster:
        keeper = MetricsApiKeeper(cluster, metrics, stage.space.namespace, domain, lambda: None, clock)
        task = asyncio.create_task(keeper.run())
        yield keeper
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serving_of(space: Space) -> Serving | None:
    return read_serving(space.need("Secret", SECRET))


def bundles(space: Space) -> list[bytes]:
    found = [space.api.get(f"{PATH}/{name}")["spec"].get("caBundle", "") for name in API_SERVICES]
    return [base64.b64decode(bundle) for bundle in found]


def authorities(bundle: bytes) -> int:
    return len(x509.load_pem_x509_certificates(bundle)) if bundle else 0


def availability(space: Space) -> list[str]:
    found = [space.api.get(f"{PATH}/{name}").get("status", {}).get("conditions", []) for name in API_SERVICES]
    return [next((c["status"] for c in conditions if c["type"] == "Available"), "?") for conditions in found]


def look_again(space: Space) -> None:
    """The keeper does not see that the clock was set; it does see a change of the Secret."""
    space.patch("Secret", SECRET, {"metadata": {"annotations": {"changed": str(datetime.now(UTC))}}})


async def until(what: str, probe: Callable[[], Any], seconds: float = 30) -> Any:
    return await asyncio.to_thread(wait_until, what, probe, seconds)


async def test_an_empty_secret_is_filled_and_the_api_server_trusts_it(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()) as keeper:
        serving = await until("a pair", lambda: serving_of(installed))
        server.serve(serving)
        await until("both bundles", lambda: set(bundles(installed)) == {serving.bundle})
        await until("trust", lambda: availability(installed) == ["True", "True"], 60)
        assert keeper.metrics_api == MetricsApi()


async def test_a_rotation_never_loses_the_api_servers_trust(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        old = await until("a pair", lambda: serving_of(installed))
        server.serve(old)
        await until("trust", lambda: availability(installed) == ["True", "True"], 60)
        clock.ahead = timedelta()
        look_again(installed)
        new = await until("another pair", lambda: other_than(serving_of(installed), old))
        assert authorities(new.bundle) == 2
        await until("both bundles", lambda: set(bundles(installed)) == {new.bundle})
        # The server still has the old pair, as until the kubelet has brought it the new one.
        await asyncio.sleep(5)
        assert availability(installed) == ["True", "True"]
        server.serve(new)
        await asyncio.sleep(5)
        assert availability(installed) == ["True", "True"]
        clock.ahead += KEEP_OLD_AUTHORITY
        look_again(installed)
        await until("one authority", lambda: [authorities(b) for b in bundles(installed)] == [1, 1])
        assert serving_of(installed).certificate == new.certificate
        await asyncio.sleep(5)
        assert availability(installed) == ["True", "True"]


def other_than(found: Serving | None, old: Serving) -> Serving | None:
    return found if found is not None and found.certificate != old.certificate else None


async def test_the_new_authority_is_announced_before_the_new_leaf_is_written(stage: Stage, installed: Space) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        await until("both bundles", lambda: all(bundles(installed)))
        await asyncio.to_thread(stage.proxy.wait_quiet)
        before = len(stage.proxy.writes())
        clock.ahead = timedelta()
        look_again(installed)
        await until("three writes", lambda: len(stage.proxy.writes()) >= before + 3)
        await asyncio.to_thread(stage.proxy.wait_quiet)
    order = [call.resource for call in stage.proxy.writes()[before:]]
    assert order == ["apiservices", "apiservices", "secrets"]


async def test_a_rotation_that_was_interrupted_is_begun_anew_and_keeps_the_old_authority(
    stage: Stage, installed: Space
) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        old = await until("a pair", lambda: serving_of(installed))
        await until("both bundles", lambda: set(bundles(installed)) == {old.bundle})
    clock.ahead = timedelta()
    stage.proxy.fail(lambda call: call.is_write and call.resource == "secrets", 503, times=2)
    async with keeping(stage, clock):
        new = await until("another pair", lambda: other_than(serving_of(installed), old), 40)
        await until("both bundles", lambda: set(bundles(installed)) == {new.bundle})
    assert new.bundle.endswith(old.bundle)


async def test_what_somebody_breaks_is_mended(stage: Stage, installed: Space) -> None:
    async with keeping(stage, Clock()):
        first = await until("a pair", lambda: serving_of(installed))
        await until("both bundles", lambda: all(bundles(installed)))
        patch = {"spec": {"caBundle": base64.b64encode(b"nonsense").decode()}}
        installed.api.call("PATCH", f"{PATH}/{API_SERVICES[0]}", patch, "application/merge-patch+json")
        await until("the bundle is back", lambda: set(bundles(installed)) == {first.bundle})
        installed.patch("Secret", SECRET, {"data": {"tls.key": None}})
        second = await until("another pair", lambda: other_than(serving_of(installed), first))
        await until("its bundle", lambda: set(bundles(installed)) == {second.bundle})


async def test_a_replacement_for_a_fault_never_loses_the_api_servers_trust(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()):
        first = await until("a pair", lambda: serving_of(installed))
        server.serve(first)
        await until("trust", lambda: availability(installed) == ["True", "True"], 60)
        installed.patch("Secret", SECRET, {"data": None})
        second = await until("another pair", lambda: other_than(serving_of(installed), first))
        assert second.bundle.endswith(first.bundle), "as the APIServices knew it"
    async with keeping(stage, Clock(), domain="example.org"):
        third = await until("another pair", lambda: other_than(serving_of(installed), second))
        assert third.bundle.endswith(second.bundle), "as the Secret knew it"
        await until("both bundles", lambda: set(bundles(installed)) == {third.bundle})
        await asyncio.sleep(5)  # the server still has the first pair
        assert availability(installed) == ["True", "True"]


async def test_a_kept_certificate_costs_no_calls(stage: Stage, installed: Space) -> None:
    async with keeping(stage, Clock()):
        await until("both bundles", lambda: all(bundles(installed)))
        await asyncio.to_thread(stage.proxy.wait_quiet, 2.0)
        before = [c for c in stage.proxy.calls if c.verb != "watch"]
        await asyncio.sleep(3)
        assert [c for c in stage.proxy.calls if c.verb != "watch"] == before
    named = [c for c in stage.proxy.calls if c.resource in ("secrets", "apiservices")]
    assert {c.verb for c in named} == {"list", "watch", "patch"}


async def test_a_foreign_api_service_is_left_alone_and_named(stage: Stage, space: Space) -> None:
    space.create("Secret", {"metadata": {"name": SECRET}, "type": "Opaque"})
    other = {"name": "prometheus-adapter", "namespace": "monitoring", "port": 443}
    make_api_services(space, other, API_SERVICES[:1])
    try:
        async with keeping(stage, Clock()) as keeper:
            await until("its owner", lambda: keeper.metrics_api.owner == "monitoring/prometheus-adapter")
            await until("a pair all the same", lambda: serving_of(space))
            await asyncio.to_thread(stage.proxy.wait_quiet)
            assert bundles_of(space, API_SERVICES[0]) == ""
    finally:
        space.api.delete(f"{PATH}/{API_SERVICES[0]}")


def bundles_of(space: Space, name: str) -> str:
    return str(space.api.get(f"{PATH}/{name}")["spec"].get("caBundle", ""))


async def test_without_the_chart_there_is_nothing_to_keep(stage: Stage) -> None:
    async with keeping(stage, Clock()):
        await asyncio.to_thread(stage.proxy.wait_quiet)
    assert stage.proxy.writes() == []


def test_services_are_told_who_owns_the_metrics_api(stage: Stage) -> None:
    space = stage.space
    other = {"name": "prometheus-adapter", "namespace": "monitoring", "port": 443}
    with stage.operator(metrics_api=True, system_namespace=space.namespace):
        space.make_service(autoscaling={"maxReplicas": 3})
        space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        make_api_services(space, other, API_SERVICES[:1])
        try:
            condition = space.wait_condition("qwen", "ScalingReady", "False", "MetricsAPIOwnedByOther")
            assert "monitoring/prometheus-adapter" in condition["message"]
        finally:
            space.api.delete(f"{PATH}/{API_SERVICES[0]}")
        space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
