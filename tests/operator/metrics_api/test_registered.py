"""Tests Conveyor's metrics API on a real API server: registered while it answers, and deleted with the chart."""

import asyncio
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from tests.operator.metrics_api.adapters import (
    API_SERVICES_PATH,
    MetricsServer,
    build_deployment,
    registered,
)
from tests.operator.metrics_api.steps import (
    NOBODY,
    OURS,
    SECRET,
    Clock,
    available,
    bundles,
    installation,
    is_available,
    keeping,
    look_again,
    serving_of,
    until,
    until_namespace_ends,
    until_registered,
)
from tests.operator.stage import Space, Stage

from conveyor_api.names import METRICS_SERVICE
from conveyor_operator.metrics_api.answer import MetricsApi
from conveyor_operator.metrics_api.registration import API_SERVICES, PATIENCE


@pytest.mark.slow
async def test_it_is_registered_once_it_answers_with_its_certificate(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()) as keeper:
        await until("that nothing answers", lambda: "does not answer" in keeper.metrics_api.missing)
        assert registered(installed) == NOBODY
        serving = await until_registered(installed, server)
        assert set(bundles(installed)) == {serving.bundle}
        assert keeper.metrics_api == MetricsApi(registered=True)
        await until_namespace_ends(installed)


async def test_a_server_with_another_certificate_is_not_registered(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock()
    async with keeping(stage, clock) as keeper:
        server.serve(await until("a pair", lambda: serving_of(installed)))
        await until("registered", lambda: registered(installed) == OURS)
    for name in API_SERVICES:
        installed.api.delete(f"{API_SERVICES_PATH}/{name}")
    installed.patch("Secret", SECRET, {"data": None})  # what the server still serves is trusted by nobody
    async with keeping(stage, clock) as keeper:
        await until("the reason", lambda: "does not serve its certificate" in keeper.metrics_api.missing)
        assert registered(installed) == NOBODY
        server.serve(await until("a pair", lambda: serving_of(installed)))
        await until("registered", lambda: registered(installed) == OURS)


async def test_a_failed_install_registers_nothing(stage: Stage, space: Space, role: str) -> None:
    space.create("Secret", {"metadata": {"name": SECRET}, "type": "Opaque"})
    space.create("Deployment", build_deployment(METRICS_SERVICE))  # its image is never pulled
    async with keeping(stage, Clock()) as keeper:
        await until("a pair", lambda: serving_of(space))
        await until("the reason", lambda: "no available pod" in keeper.metrics_api.missing)
        await asyncio.to_thread(stage.proxy.wait_quiet)
    assert [call for call in stage.proxy.writes() if call.resource == "apiservices"] == []
    assert registered(space) == NOBODY


async def test_without_the_chart_there_is_nothing_to_keep(stage: Stage) -> None:
    async with keeping(stage, Clock()):
        await asyncio.to_thread(stage.proxy.wait_quiet)
    assert stage.proxy.writes() == []


async def test_what_the_api_server_cannot_use_is_withdrawn_and_comes_back_with_its_pod(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock()
    async with keeping(stage, clock) as keeper:
        await until_registered(installed, server)
        installed.patch("Deployment", METRICS_SERVICE, {"spec": {"replicas": 0}})
        installed.patch("Service", METRICS_SERVICE, {"spec": {"externalName": "nowhere.invalid"}})
        await until_seen_unavailable(installed)
        assert registered(installed) == OURS, "it may be back in a moment"

        def is_withdrawn() -> bool:
            """Return whether it is withdrawn. The operator's delay begins when its own watch shows the fault."""
            clock.ahead += PATIENCE
            look_again(installed)
            return registered(installed) == NOBODY

        await until("withdrawn", is_withdrawn)
        await until_namespace_ends(installed)
        assert "no available pod" in keeper.metrics_api.missing
        installed.patch("Service", METRICS_SERVICE, {"spec": {"externalName": "localhost"}})
        installed.patch("Deployment", METRICS_SERVICE, {"spec": {"replicas": 1}})
        await until("registered again", lambda: is_available(installed), 60, lambda: registered(installed))


async def until_seen_unavailable(space: Space) -> None:
    """Wait until the API server sees that it is unavailable. It checks again when the object changes."""

    def unavailable() -> bool:
        for name in API_SERVICES:
            patch = {"metadata": {"annotations": {"looked": str(datetime.now(UTC))}}}
            space.api.call("PATCH", f"{API_SERVICES_PATH}/{name}", patch, "application/merge-patch+json")
        return [c["status"] for c in available(space)] == ["False", "False"]

    await until("unavailable", unavailable, 60)


@pytest.mark.parametrize("alive", [True, False], ids=["with the operator", "without the operator"])
async def test_an_uninstall_leaves_none(
    stage: Stage, installed: Space, server: MetricsServer, role: str, alive: bool
) -> None:
    """The chart's ClusterRole is always deleted with it, and the garbage collector then deletes the APIServices."""
    async with keeping(stage, Clock()):
        await until_registered(installed, server)
        if alive:
            installed.delete("Deployment", METRICS_SERVICE)
            installed.api.delete(role)
            await until("nothing is left", lambda: registered(installed) == NOBODY, 60)
    if not alive:
        installed.api.delete(role)
        await until("nothing is left", lambda: registered(installed) == NOBODY, 60)
    await until_namespace_ends(installed)


@pytest.mark.slow
async def test_the_deletion_of_its_own_namespace_does_not_hang(
    stage: Stage, space: Space, server: MetricsServer, role: str
) -> None:
    own = Space(space.api, f"system-{uuid4().hex[:6]}")
    space.api.create("/api/v1/namespaces", {"metadata": {"name": own.namespace}})
    with installation(own, server):
        async with keeping(stage, Clock(), namespace=own.namespace):
            await until_registered(own, server)
            space.api.delete(f"/api/v1/namespaces/{own.namespace}")
            await until("withdrawn", lambda: registered(space) == NOBODY)
        server.close()
        await until("its end", lambda: not space.api.reachable(f"/api/v1/namespaces/{own.namespace}"), 60)
