"""Tests when the metrics server is registered, kept and withdrawn. The clock is a number here."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from conveyor_operator.metrics_api.registration import (
    API_SERVICES,
    PATIENCE,
    SETTLE,
    Register,
    Registration,
    Seen,
    Wait,
    Withdraw,
    build_api_service,
    build_release,
    differs,
)

Json = dict[str, Any]

START = datetime(2026, 11, 22, 8, 0, 0, tzinfo=UTC)
SECOND = timedelta(seconds=1)
SERVICE: Json = {
    "metadata": {"namespace": "conveyor-system", "name": "conveyor-metrics"},
    "spec": {"ports": [{"name": "https", "port": 443}]},
}
ROLE: Json = {"metadata": {"name": "conveyor-operator-metrics-api", "uid": "role-1"}}
DEPLOYMENT: Json = {"metadata": {}, "status": {"availableReplicas": 1}}
ENDING: Json = {"metadata": {"deletionTimestamp": "2026-11-22T08:00:00Z"}}


def ours(name: str, available: str | None = "True") -> Json:
    made = build_api_service(name, SERVICE, b"bundle", ROLE)
    made["metadata"] |= {"uid": f"uid-{name}", "resourceVersion": "1"}
    if available is not None:
        made["status"] = {"conditions": [{"type": "Available", "status": available, "message": "no route"}]}
    return made


def foreign(name: str) -> Json:
    return {"metadata": {"name": name}, "spec": {"service": {"namespace": "monitoring", "name": "adapter"}}}


NONE: dict[str, Json | None] = dict.fromkeys(API_SERVICES)
BOTH: dict[str, Json | None] = {name: ours(name) for name in API_SERVICES}
DOWN: dict[str, Json | None] = {name: ours(name, "False") for name in API_SERVICES}


def see(api_services: dict[str, Json | None], **more: Any) -> Seen:
    parts: Json = {"deployment": DEPLOYMENT, "namespace_object": {"metadata": {}}}
    return Seen("conveyor-system", api_services, **(parts | more))


def test_both_are_made_when_a_pod_is_available_and_nobody_has_the_group() -> None:
    assert Registration().plan(see(NONE), START) == Register()
    assert Registration().plan(see(BOTH), START) == Register()


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (see(NONE, deployment=None), "no Deployment"),
        (see(NONE, deployment=ENDING), "no Deployment"),
        (see(NONE, deployment={"metadata": {}, "status": {}}), "no available pod"),
        (see(NONE, namespace_object=ENDING), "is being deleted"),
        (see({**NONE, API_SERVICES[0]: foreign(API_SERVICES[0])}), "belongs to monitoring/adapter"),
        (see({**NONE, API_SERVICES[1]: {"metadata": {}, "spec": {}}}), "belongs to the API server itself"),
    ],
)
def test_neither_is_made_while_something_is_in_the_way(seen: Seen, why: str) -> None:
    plan = Registration().plan(seen, START)
    assert isinstance(plan, Wait)
    assert why in plan.why


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (see({**BOTH, API_SERVICES[1]: foreign(API_SERVICES[1])}), "belongs to monitoring/adapter"),
        (see({**BOTH, API_SERVICES[1]: None}), "one of the two APIServices was deleted"),
        (see(BOTH, deployment=None), "no Deployment"),
        (see(BOTH, namespace_object=ENDING), "is being deleted"),
    ],
)
def test_ours_are_withdrawn_at_once_when_they_have_no_place(seen: Seen, why: str) -> None:
    plan = Registration().plan(seen, START)
    assert isinstance(plan, Withdraw)
    assert why in plan.why


def test_what_the_api_server_cannot_use_is_withdrawn_after_a_minute_and_tried_again_ever_later() -> None:
    registration, now = Registration(), START
    for pause in (60, 120, 240):
        assert registration.plan(see(DOWN), now) == Register(now + PATIENCE)
        assert registration.plan(see(DOWN), now + PATIENCE - SECOND) == Register(now + PATIENCE)
        now += PATIENCE
        withdrawn = registration.plan(see(DOWN), now)
        assert isinstance(withdrawn, Withdraw)
        assert "no route" in withdrawn.why
        retry = now + timedelta(seconds=pause)
        waiting = registration.plan(see(NONE), retry - SECOND)
        assert isinstance(waiting, Wait)
        assert waiting.until == retry
        assert registration.plan(see(NONE), retry) == Register()
        now = retry
    assert registration.plan(see(BOTH), now) == Register()
    assert registration.plan(see(DOWN), now) == Register(now + PATIENCE), "patience begins anew"


def test_the_longest_pause_is_half_an_hour() -> None:
    registration, now = Registration(), START
    for _ in range(20):
        registration.plan(see(DOWN), now)
        now += PATIENCE
        assert isinstance(registration.plan(see(DOWN), now), Withdraw)
        waiting = registration.plan(see(NONE), now)
        assert isinstance(waiting, Wait)
        assert waiting.until is not None
        assert waiting.until - now <= timedelta(minutes=30)
        now = waiting.until


def test_what_was_away_because_no_pod_was_there_comes_back_with_the_pod() -> None:
    registration = Registration()
    registration.plan(see(DOWN), START)
    assert isinstance(registration.plan(see(DOWN), START + PATIENCE), Withdraw)
    assert isinstance(registration.plan(see(NONE, deployment={"metadata": {}}), START + PATIENCE), Wait)
    assert registration.plan(see(NONE), START + PATIENCE + SECOND) == Register()


def test_what_somebody_took_away_leaves_the_group_free_for_a_moment() -> None:
    registration = Registration()
    registration.record_loss(START)
    waiting = registration.plan(see(NONE), START)
    assert isinstance(waiting, Wait)
    assert waiting.until == START + SETTLE
    assert registration.plan(see(NONE), START + SETTLE) == Register()


def test_only_a_change_of_what_is_ours_is_a_difference() -> None:
    expected = build_api_service(API_SERVICES[0], SERVICE, b"bundle", ROLE)
    found = ours(API_SERVICES[0])
    assert not differs(found, expected)
    assert not differs({**found, "metadata": {**found["metadata"], "labels": {"more": "of them"}}}, expected)
    assert differs({**found, "spec": {**found["spec"], "caBundle": ""}}, expected)
    assert differs({**found, "metadata": {}}, expected)


def test_what_was_taken_over_keeps_its_own_owners_and_loses_ours() -> None:
    theirs = {"kind": "ClusterRole", "name": "adapter", "uid": "2"}
    found = foreign(API_SERVICES[1])
    assert build_release(found) is None
    owners = [*ours(API_SERVICES[1])["metadata"]["ownerReferences"], theirs]
    found["metadata"] |= {"resourceVersion": "7", "ownerReferences": owners}
    patch = build_release(found)
    assert patch is not None
    assert patch["metadata"]["ownerReferences"] == [theirs]
    assert patch["metadata"]["resourceVersion"] == "7"
