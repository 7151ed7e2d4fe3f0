"""Tests the certificate on a real API server: filled in, rotated without a loss of trust, and repaired."""

import asyncio
import base64
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.metrics_api.adapters import (
    API_SERVICES_PATH,
    MetricsServer,
    registered,
)
from tests.operator.metrics_api.steps import (
    AGED,
    OURS,
    SECRET,
    Clock,
    authorities,
    available,
    bundles,
    keeping,
    look_again,
    serving_of,
    until,
    until_queried_again,
    until_registered,
)
from tests.operator.stage import Json, Space, Stage, wait_until

from conveyor_operator.cluster import Cluster
from conveyor_operator.metrics_api import certificates
from conveyor_operator.metrics_api.certificates import KEEP_OLD_AUTHORITY, Serving
from conveyor_operator.metrics_api.registration import API_SERVICES


async def test_a_rotation_never_loses_the_api_servers_trust(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        old = await until_registered(installed, server)
        trusted_since = [c["lastTransitionTime"] for c in available(installed)]
        clock.ahead = timedelta()
        look_again(installed)
        new = await until("another pair", lambda: other_than(serving_of(installed), old))
        assert authorities(new.bundle) == 2
        await until("both bundles", lambda: set(bundles(installed)) == {new.bundle})
        # The server still has the old pair, as until the kubelet has brought it the new one.
        await until_queried_again(installed, server)
        server.serve(new)
        await until_queried_again(installed, server)
        clock.ahead += KEEP_OLD_AUTHORITY
        look_again(installed)
        await until("one authority", lambda: [authorities(b) for b in bundles(installed)] == [1, 1])
        assert serving_of(installed).certificate == new.certificate
        await until_queried_again(installed, server)
        assert [c["status"] for c in available(installed)] == ["True", "True"]
        assert [c["lastTransitionTime"] for c in available(installed)] == trusted_since


def other_than(found: Serving | None, old: Serving) -> Serving | None:
    return found if found is not None and found.certificate != old.certificate else None


async def test_the_new_authority_is_announced_before_the_new_leaf_is_written(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        await until_registered(installed, server)
        await asyncio.to_thread(stage.proxy.wait_quiet)
        before = len(stage.proxy.writes())
        clock.ahead = timedelta()
        look_again(installed)
        await until("three writes", lambda: len(stage.proxy.writes()) >= before + 3)
        await asyncio.to_thread(stage.proxy.wait_quiet)
    order = [call.resource for call in stage.proxy.writes()[before:]]
    assert order == ["apiservices", "apiservices", "secrets"]


async def test_a_rotation_that_was_interrupted_is_begun_anew_and_keeps_the_old_authority(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    clock = Clock(AGED)
    async with keeping(stage, clock):
        old = await until_registered(installed, server)
    clock.ahead = timedelta()
    stage.proxy.fail(lambda call: call.is_write and call.resource == "secrets", 503, times=2)
    async with keeping(stage, clock):
        new = await until("another pair", lambda: other_than(serving_of(installed), old), 40)
        await until("both bundles", lambda: set(bundles(installed)) == {new.bundle})
    assert new.bundle.endswith(old.bundle)


async def test_every_manual_change_is_reverted(stage: Stage, installed: Space, server: MetricsServer) -> None:
    async with keeping(stage, Clock()):
        first = await until_registered(installed, server)
        patch = {"spec": {"caBundle": base64.b64encode(b"nonsense").decode()}}
        installed.api.call("PATCH", f"{API_SERVICES_PATH}/{API_SERVICES[0]}", patch, "application/merge-patch+json")
        await until("the bundle is back", lambda: set(bundles(installed)) == {first.bundle})
        installed.patch("Secret", SECRET, {"data": {"tls.key": None}})
        second = await until("another pair", lambda: other_than(serving_of(installed), first))
        await until("its bundle", lambda: set(bundles(installed)) == {second.bundle})


async def test_a_deleted_secret_is_created_again_and_keeps_the_authority_in_use(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()):
        first = await until_registered(installed, server)
        installed.delete("Secret", SECRET)
        second = await until("another pair", lambda: other_than(serving_of(installed), first))
        await until("its bundle", lambda: set(bundles(installed)) == {second.bundle})
        assert second.bundle.endswith(first.bundle), "the server has the old pair until the kubelet updates its files"
        await until_queried_again(installed, server)


async def test_a_secret_that_was_overwritten_keeps_the_authority_in_use(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()):
        first = await until_registered(installed, server)
        now = datetime.now(UTC) - KEEP_OLD_AUTHORITY * 10_000
        foreign = certificates.issue(("conveyor-metrics.elsewhere.svc",), now)
        data = {"tls.crt": foreign.certificate, "tls.key": foreign.key, "ca.crt": foreign.bundle}
        encoded = {key: base64.b64encode(value).decode() for key, value in data.items()}
        installed.patch("Secret", SECRET, {"data": encoded})
        second = await until("another pair", lambda: other_than(other_than(serving_of(installed), first), foreign))
        assert first.bundle in second.bundle
        await until_queried_again(installed, server)


async def test_a_replacement_for_a_fault_never_loses_the_api_servers_trust(
    stage: Stage, installed: Space, server: MetricsServer
) -> None:
    async with keeping(stage, Clock()):
        first = await until_registered(installed, server)
        trusted_since = [c["lastTransitionTime"] for c in available(installed)]
        installed.patch("Secret", SECRET, {"data": None})
        second = await until("another pair", lambda: other_than(serving_of(installed), first))
        assert second.bundle.endswith(first.bundle), "as the APIServices knew it"
    async with keeping(stage, Clock(), domain="example.org"):
        third = await until("another pair", lambda: other_than(serving_of(installed), second))
        assert third.bundle.endswith(second.bundle), "as the Secret knew it"
        await until("both bundles", lambda: set(bundles(installed)) == {third.bundle})
        await until_queried_again(installed, server)  # it still has the first pair
        assert [c["lastTransitionTime"] for c in available(installed)] == trusted_since


async def test_an_answer_that_is_older_than_the_watch_is_ignored(
    stage: Stage, installed: Space, server: MetricsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = Cluster.apply

    async def apply_slowly(*arguments: Any, **options: Any) -> Any:
        answer = await apply(*arguments, **options)
        await asyncio.to_thread(wait_until, "its status", lambda: is_judged(installed, answer))
        await asyncio.sleep(0.5)  # the watch is quicker
        return answer

    monkeypatch.setattr(Cluster, "apply", apply_slowly)
    async with keeping(stage, Clock()):
        first = await until("a pair", lambda: serving_of(installed))
        server.serve(first)
        await until("registered", lambda: registered(installed) == OURS, 60)
        installed.patch("Secret", SECRET, {"data": None})
        await until("another pair", lambda: other_than(serving_of(installed), first))


def is_judged(space: Space, api_service: Json) -> bool:
    """Return whether the API server has written its condition for the APIService."""
    return bool(
        space.api.get(f"{API_SERVICES_PATH}/{api_service['metadata']['name']}").get("status", {}).get("conditions")
    )


async def test_what_is_kept_costs_no_calls(stage: Stage, installed: Space, server: MetricsServer) -> None:
    async with keeping(stage, Clock()):
        await until_registered(installed, server)
        await asyncio.to_thread(stage.proxy.wait_quiet, 2.0)
        before = [c for c in stage.proxy.calls if c.verb != "watch"]
        await until_queried_again(installed, server)  # events that change nothing
        await asyncio.to_thread(stage.proxy.wait_quiet, 1.0)
        assert [c for c in stage.proxy.calls if c.verb != "watch"] == before
    named = [c for c in stage.proxy.calls if c.resource in ("secrets", "apiservices")]
    assert {c.verb for c in named} == {"list", "watch", "patch"}
