"""Tests that names which never served expire, and that names which have served do not."""

import asyncio
import contextlib
import time

import pytest
from tests.operator.kubelet import Kubelet, ready
from tests.operator.served_names.test_claims import Teams, holders, name, serve, teams, wait_message
from tests.operator.stage import Space, wait_until

from conveyor_api.names import UNSERVED_ANNOTATION
from conveyor_api.served_name import build_served_name
from conveyor_kube.kubeconfig import load_configuration
from conveyor_kube.served_names import NameIndex, parse_claim
from conveyor_operator.cluster import Cluster
from conveyor_operator.inferenceservice.naming import find_requested_name
from conveyor_operator.metrics import Metrics
from conveyor_operator.served_names import expiry
from conveyor_operator.served_names.expiry import Expiry
from e2e.cluster.control_plane import ControlPlane

__all__ = ["name", "teams"]  # fixtures

SECONDS = 3.0


def start(teams: Teams, seconds: float = SECONDS) -> None:
    namespaces = (teams.a.namespace, teams.b.namespace)
    teams.stage.start(watch_namespaces=namespaces, unserved_name_seconds=seconds)


def find_marks(space: Space) -> dict[str, bool]:
    """Return whether each claim of the namespace has the mark, by name."""
    claims = space.list("ServedName")
    return {each["spec"]["name"]: UNSERVED_ANNOTATION in each["metadata"].get("annotations", {}) for each in claims}


def test_a_name_that_never_served_goes_to_another_team(teams: Teams, name: str) -> None:
    start(teams)
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "True", "NameClaimed")
    serve(teams.a, "good", name)
    wait_message(teams.a, "good", "True", "NameClaimed")  # after it has expired
    assert holders(teams.a)[name] == teams.a.namespace
    wait_message(teams.b, "squat", "False", "NameTaken")


def test_a_name_that_never_served_and_that_nobody_wants_is_free_again(teams: Teams, name: str) -> None:
    start(teams)
    serve(teams.a, "trial", name)
    wait_message(teams.a, "trial", "True", "NameClaimed")
    teams.a.delete("InferenceService", "trial")
    wait_until("its end", lambda: name not in holders(teams.a))


def test_a_name_that_has_served_does_not_expire(teams: Teams, name: str) -> None:
    start(teams)
    with Kubelet(teams.a, ready):
        serve(teams.a, "good", name)
        teams.a.wait_condition("good", "Ready", "True", "Ready")
        wait_until("the end of the mark", lambda: find_marks(teams.a).get(name) is False)
    teams.a.delete("InferenceService", "good")
    serve(teams.b, "squat", name)
    wait_message(teams.b, "squat", "False", "NameTaken")
    time.sleep(2 * SECONDS)
    assert find_marks(teams.a)[name] is False
    wait_message(teams.b, "squat", "False", "NameTaken")


def test_without_a_limit_and_without_a_mark_names_do_not_expire(teams: Teams, name: str) -> None:
    """Claims of earlier releases have no mark."""
    start(teams, 0)
    serve(teams.a, "trial", name)
    wait_message(teams.a, "trial", "True", "NameClaimed")
    time.sleep(SECONDS)
    assert find_marks(teams.a)[name] is True


def test_only_a_service_that_is_ready_with_its_present_spec_serves_its_name() -> None:
    metadata = {"name": "qwen", "creationTimestamp": "2026-11-30T00:00:00Z", "generation": 2}
    good = {"observedGeneration": 2, "conditions": [{"type": "Ready", "status": "True"}]}
    assert find_requested_name({"metadata": metadata, "status": good}).is_ready
    for status in (
        None,
        {},
        good | {"observedGeneration": 1},
        good | {"conditions": [{"type": "Ready", "status": "False"}]},
    ):
        assert not find_requested_name({"metadata": metadata, "status": status}).is_ready


async def test_a_service_that_becomes_ready_late_keeps_its_name(
    control_plane: ControlPlane, teams: Teams, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim is old: it becomes Ready while no operator runs, which the next operator sees some time later."""
    monkeypatch.setattr(expiry, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(expiry, "_START_SECONDS", 2.0)
    late, never = f"{name}-late", f"{name}-never"
    index, space = NameIndex(), teams.a
    for each in (late, never):
        body = space.create("ServedName", build_served_name(space.namespace, each, is_unserved=True))
        body["metadata"]["creationTimestamp"] = "2026-11-01T00:00:00Z"
        index.put_claim(each, parse_claim(body))
    configuration = await load_configuration(str(control_plane.kubeconfig))
    async with Cluster(configuration, Metrics()) as cluster:
        expiring = Expiry(cluster, index, 1000.0)
        running = asyncio.create_task(expiring.run())
        await asyncio.sleep(1)
        assert expiring.expired == set(), "no claim expires right after the start"
        expiring.see(f"{space.namespace}/good", late)
        async with asyncio.timeout(30):
            while never in holders(space) or find_marks(space)[late]:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        assert len(expiring.expired) == 1


async def test_claims_are_judged_by_the_services_of_that_moment_and_only_changes_wake(
    control_plane: ControlPlane, teams: Teams, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expiry, "_START_SECONDS", 0.0)
    index, space = NameIndex(), teams.a
    configuration = await load_configuration(str(control_plane.kubeconfig))
    async with Cluster(configuration, Metrics()) as cluster:
        expiring = Expiry(cluster, index, 1000.0)
        for each in (f"{name}-first", f"{name}-second"):
            body = space.create("ServedName", build_served_name(space.namespace, each, is_unserved=True))
            body["metadata"]["creationTimestamp"] = "2026-11-01T00:00:00Z"
            index.put_claim(each, parse_claim(body))
        running = asyncio.create_task(expiring.run())
        async with asyncio.timeout(30):
            while not expiring.expired:  # noqa: ASYNC110
                await asyncio.sleep(0)
        expiring.see(f"{space.namespace}/good", f"{name}-second")  # while the first claim is deleted
        async with asyncio.timeout(30):
            while find_marks(space) != {f"{name}-second": False}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    expiring._changed.clear()
    expiring.see(f"{space.namespace}/good", f"{name}-second")
    assert not expiring._changed.is_set(), "an event without a change starts no round"
