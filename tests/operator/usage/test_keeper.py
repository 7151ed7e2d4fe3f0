"""Tests on a real API server that the operator keeps what the gateways have counted, and who prints it."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from prometheus_client import generate_latest
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_api import names
from conveyor_kube.gateways import Gateway
from conveyor_kube.kubeconfig import load_configuration
from conveyor_kubectl.command import main
from conveyor_operator.cluster import Cluster
from conveyor_operator.metrics import Metrics, ServiceState
from conveyor_operator.usage import keeper
from conveyor_operator.usage.held_pods import HeldPod
from conveyor_operator.usage.keeper import UsageKeeper
from conveyor_operator.usage.sums import PODS
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane


async def until(probe: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(probe):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_usage_of_a_gateway_is_kept_and_printed(
    control_plane: ControlPlane,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(keeper, "_PERIOD_SECONDS", 0.1)
    api, today = Api(control_plane.kubeconfig), datetime.now(UTC).date().isoformat()
    rows: list[list[Any]] = [
        ["team-a/chat", "team-b/ann", "batch", 7, 700, 70, 350, 1500.0, 0.0],
        ["team-a/chat", "", "", 1, 10, 0, 5, 0.0, 0.0],
    ]
    invalid = ["team-a/chat", "x" * 500, "", 1, 1, 0, 1, 0.0, 0.0]  # takes no rows from others
    page = {"process": "0" * 16, "days": {today: [*rows, invalid]}}
    path = f"/api/v1/namespaces/{namespace}/configmaps"

    def stored() -> Any:
        found = [each for each in api.get(path)["items"] if each["metadata"]["name"] == names.USAGE_NAME]
        return [json.loads((each.get("data") or {}).get(today, "{}")) for each in found]

    async with running_engine(answering(web.json_response, data=page)) as gateway:
        configuration = await load_configuration(str(control_plane.kubeconfig))
        async with Cluster(configuration, Metrics()) as cluster:
            for _ in range(2):  # the second one goes on with what the first one stored
                gateways = [Gateway(own_address(), gateway.port, serving=True)]
                kept = UsageKeeper(cluster, Metrics(), namespace, lambda gateways=gateways: gateways, lambda: None)
                running = asyncio.create_task(kept.run())
                await until(lambda: stored() == [{"0" * 16: rows}])
                rows[1][3] += 1
                await until(lambda: stored() == [{"0" * 16: rows}])
                running.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await running

    def show(*arguments: str) -> str:
        flags = (f"--kubeconfig={control_plane.kubeconfig}", f"--system-namespace={namespace}")
        assert main(["usage", *arguments, *flags]) == 0
        return capsys.readouterr().out

    text = await asyncio.to_thread(show, "--since", "7d")
    assert [line.split() for line in text.splitlines()] == [
        ["KEY", "REQUESTS", "PROMPT", "TOKENS", "CACHED", "OUTPUT", "TOKENS", "ENGINE", "SECONDS"],
        ["team-b/ann", "7", "700", "70", "350", "1.5"],
        ["(no", "key)", "3", "10", "0", "5", "0.0"],
    ]
    of_namespaces = json.loads(await asyncio.to_thread(show, "--by", "namespace", "-o", "json"))
    assert {name: each["requests"] for name, each in of_namespaces.items()} == {"team-b": 7, "team-a": 3}
    assert "team-a/chat" in await asyncio.to_thread(show, "--by", "service")
    assert "batch" in await asyncio.to_thread(show, "--by", "class")


async def test_the_time_of_pods_goes_on_with_another_operator(
    control_plane: ControlPlane,
    namespace: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(keeper, "_PERIOD_SECONDS", 0.1)
    monkeypatch.setattr(keeper, "_PODS_SECONDS", 0.5)
    api, metrics, began_unix = Api(control_plane.kubeconfig), Metrics(), time.time()
    metrics.put_service("team-a", "chat", ServiceState((), {}))
    path = f"/api/v1/namespaces/{namespace}/configmaps"

    def read_pods() -> float:
        found = [each for each in api.get(path)["items"] if each["metadata"]["name"] == names.USAGE_NAME]
        days = [json.loads(text) for each in found for text in (each.get("data") or {}).values()]
        return sum(row[8] for day in days for row in day[PODS] if row[0] == "team-a/chat")

    def read_metric() -> float:
        labels = {"namespace": "team-a", "inference_service": "chat"}
        return metrics.registry.get_sample_value("conveyor_operator_pod_seconds_total", labels) or 0.0

    pods = [HeldPod("team-a/chat", began_unix - 3600), HeldPod("team-a/gone", began_unix)]
    async with Cluster(await load_configuration(str(control_plane.kubeconfig)), Metrics()) as cluster:

        @contextlib.asynccontextmanager
        async def keeping() -> AsyncIterator[None]:
            kept = UsageKeeper(cluster, metrics, namespace, tuple, lambda: pods)
            running = asyncio.create_task(kept.run())
            yield
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running

        async with keeping():
            await until(lambda: read_pods() >= 1.0)
        before, away = read_pods(), time.time()
        await asyncio.sleep(2)
        async with keeping():
            await until(lambda: read_pods() >= before + 2.0)
            await until(lambda: read_metric() >= before + time.time() - away - 1.5)  # a busy keeper is late
        assert read_pods() <= time.time() - began_unix + 1, "from the first operator's start, and not twice"
    assert 'conveyor_operator_pod_seconds_total{inference_service="gone"' not in str(generate_latest(metrics.registry))

    def show(*arguments: str) -> list[list[str]]:
        flags = (f"--kubeconfig={control_plane.kubeconfig}", f"--system-namespace={namespace}")
        assert main(["usage", *arguments, *flags]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    head, *rows = await asyncio.to_thread(show, "--by=service", "--since=2d")
    assert head[-2:] == ["POD", "SECONDS"]
    assert {row[0] for row in rows} == {"team-a/chat", "team-a/gone"}
    assert len(await asyncio.to_thread(show, "--by=key", "--since=2d")) == 1, "pods are of no key"


def test_without_usage_the_command_says_where_it_looked(
    control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--kubeconfig={control_plane.kubeconfig}", f"--system-namespace={namespace}")
    assert main(["usage", *flags]) == 1
    assert f"no ConfigMap conveyor-usage in {namespace}" in capsys.readouterr().err
