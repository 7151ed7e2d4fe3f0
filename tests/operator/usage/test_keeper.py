"""Tests on a real API server that the operator keeps what the gateways have counted, and who prints it."""

import asyncio
import contextlib
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from aiohttp import web
from tests.gateway.cluster import own_address
from tests.gateway.engine_servers import answering, running_engine

from conveyor_api import names
from conveyor_kube.gateways import Gateway
from conveyor_kube.kubeconfig import load_configuration
from conveyor_kubectl.command import main
from conveyor_operator.cluster import Cluster
from conveyor_operator.metrics import Metrics
from conveyor_operator.usage import keeper
from conveyor_operator.usage.keeper import UsageKeeper
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
        ["team-a/chat", "team-b/ann", "batch", 7, 700, 70, 350, 1500.0],
        ["team-a/chat", "", "", 1, 10, 0, 5, 0.0],
    ]
    invalid = ["team-a/chat", "x" * 500, "", 1, 1, 0, 1, 0.0]  # takes no rows from others
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
                kept = UsageKeeper(cluster, namespace, lambda gateways=gateways: gateways)
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


def test_without_usage_the_command_says_where_it_looked(
    control_plane: ControlPlane, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--kubeconfig={control_plane.kubeconfig}", f"--system-namespace={namespace}")
    assert main(["usage", *flags]) == 1
    assert f"no ConfigMap conveyor-usage in {namespace}" in capsys.readouterr().err
