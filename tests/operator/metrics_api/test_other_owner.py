"""Tests another owner of the group on a real API server, which comes before or after Conveyor, or between two calls."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from tests.operator.metrics_api.adapters import (
    API_SERVICES_PATH,
    MetricsServer,
    OtherAdapter,
    registered,
)
from tests.operator.metrics_api.steps import (
    NOBODY,
    OURS,
    THEIRS,
    Clock,
    is_available,
    keeping,
    look_again,
    serving_of,
    until,
    until_namespace_ends,
    until_registered,
)
from tests.operator.stage import Json, Space, Stage, wait_until

from conveyor_api.names import METRICS_SERVICE
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.errors import Conflict
from conveyor_operator.metrics import Metrics
from conveyor_operator.metrics_api.certificates import issue
from conveyor_operator.metrics_api.registrar import Registrar
from conveyor_operator.metrics_api.registration import API_SERVICES, SETTLE


async def test_an_owner_that_was_there_before_keeps_the_group_until_it_goes(
    stage: Stage, installed: Space, server: MetricsServer, other: OtherAdapter
) -> None:
    clock = Clock()
    other.register()
    async with keeping(stage, clock) as keeper:
        server.serve(await until("a pair all the same", lambda: serving_of(installed)))
        await until("its owner", lambda: keeper.metrics_api.owner == f"{installed.namespace}/other-adapter")
        await asyncio.to_thread(other.wait_scaled)
        assert registered(installed) == THEIRS
        other.unregister()
        await until("the reason", lambda: "less than 30 s ago" in keeper.metrics_api.missing)
        assert registered(installed) == NOBODY
        clock.ahead += SETTLE
        look_again(installed)
        await until("registered", lambda: is_available(installed), 60)
        await until_namespace_ends(installed)


async def test_an_owner_that_comes_later_gets_the_group_whole(
    stage: Stage, installed: Space, server: MetricsServer, other: OtherAdapter, role: str
) -> None:
    async with keeping(stage, Clock()) as keeper:
        await until_registered(installed, server)
        other.register()
        await until("withdrawn", lambda: registered(installed) == THEIRS)
        await asyncio.to_thread(other.wait_scaled)
        await until_namespace_ends(installed)
        assert keeper.metrics_api.api_service == API_SERVICES[1]
        await until("no owner of ours", lambda: not taken_over(installed)["metadata"].get("ownerReferences"))
    installed.api.delete(role)
    await asyncio.to_thread(other.wait_scaled)
    assert registered(installed) == THEIRS, "our uninstall took it away"


def taken_over(space: Space) -> Json:
    return space.api.get(f"{API_SERVICES_PATH}/{API_SERVICES[1]}")


async def test_one_that_comes_between_the_look_and_the_write_keeps_the_group(
    stage: Stage, installed: Space, server: MetricsServer, other: OtherAdapter
) -> None:
    """The watch has not reported an APIService when the operator decides to register."""
    pair = issue((f"{METRICS_SERVICE}.{installed.namespace}.svc",), datetime.now(UTC))
    server.serve(pair)
    other.register()
    async with Cluster(await load_configuration(stage.settings.kubeconfig), Metrics()) as cluster:
        registrar = Registrar(cluster, installed.namespace, dict.fromkeys(API_SERVICES))
        with pytest.raises(Conflict):
            await registrar.register(pair.bundle)
    assert registered(installed) == THEIRS


async def test_one_version_that_is_refused_takes_the_other_along(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    stage.proxy.fail(lambda call: call.is_write and call.name == API_SERVICES[0], 403, times=1)
    async with keeping(stage, Clock()):
        server.serve(await until("a pair", lambda: serving_of(installed)))
        await until("registered in the end", lambda: registered(installed) == OURS, 60)
    writes = [(c.verb, c.name, c.status) for c in stage.proxy.writes() if c.resource == "apiservices"]
    assert writes[:2] == [("patch", API_SERVICES[1], 201), ("patch", API_SERVICES[0], 403)]
    # The API server writes its view into the one that is there, so that the first try to delete it may be a Conflict.
    withdrawn = writes.index(("delete", API_SERVICES[1], 200))
    assert writes[withdrawn + 1 :] == [("patch", API_SERVICES[1], 201), ("patch", API_SERVICES[0], 201)]


async def test_its_own_withdrawal_is_no_loss_even_if_the_watch_reports_it_first(
    stage: Stage, installed: Space, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = Cluster.delete

    async def delete_slowly(*arguments: Any) -> None:
        await delete(*arguments)
        await asyncio.sleep(0.5)  # the watch is quicker

    monkeypatch.setattr(Cluster, "delete", delete_slowly)
    stage.proxy.fail(lambda call: call.is_write and call.name == API_SERVICES[0], 403, times=1)
    async with keeping(stage, Clock()):  # a clock that stands: a pause after a loss would not end
        server.serve(await until("a pair", lambda: serving_of(installed)))
        await until("registered in the end", lambda: registered(installed) == OURS)


@pytest.mark.slow
def test_services_get_the_name_of_the_owner_of_the_metrics_api(
    stage: Stage, installed: Space, other: OtherAdapter
) -> None:
    with stage.operator(metrics_api=True, system_namespace=installed.namespace):
        installed.make_service(autoscaling={"maxReplicas": 3})
        condition = installed.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        wait_until("the reason", lambda: "does not answer" in installed.condition("qwen", "ScalingReady")["message"])
        other.register()
        condition = installed.wait_condition("qwen", "ScalingReady", "False", "MetricsAPIOwnedByOther")
        assert f"{installed.namespace}/other-adapter" in condition["message"]
        other.unregister()
        condition = installed.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")
        assert "is not registered" in condition["message"]
