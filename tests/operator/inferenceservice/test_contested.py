"""Tests that the operator slows down when another field manager changes a child again after each restore."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from tests.operator.stage import Json, Space, Stage, wait_until

from conveyor_operator.loop.contests import Contest, explain

AUTOSCALING = {"minReplicas": 1, "maxReplicas": 4}
NOW = datetime(2027, 1, 1, tzinfo=UTC)


@contextmanager
def opponent(space: Space, kind: str, edit: Json, name: str = "qwen-engine") -> Iterator[None]:
    """Make the edit again as soon as it is undone."""
    ended = threading.Event()

    def fight() -> None:
        version = ""
        while not ended.is_set():
            now = space.need(kind, name)["metadata"]["resourceVersion"]
            if now != version:
                version = space.patch(kind, name, edit)["metadata"]["resourceVersion"]
            time.sleep(0.02)

    thread = threading.Thread(target=fight)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def count_applies(stage: Stage, resource: str, since: int) -> int:
    return sum(call.verb == "patch" and call.resource == resource for call in stage.proxy.calls[since:])


@pytest.mark.parametrize(
    ("kind", "condition", "field", "edit"),
    [
        (
            "Deployment",
            "Progressing",
            "spec.template.spec.terminationGracePeriodSeconds",
            {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": 7}}}},
        ),
        ("HorizontalPodAutoscaler", "ScalingReady", "spec.maxReplicas", {"spec": {"maxReplicas": 50}}),
    ],
)
def test_a_contested_child_is_restored_after_pauses(
    kind: str, condition: str, field: str, edit: Json, stage: Stage
) -> None:
    space = stage.space
    with stage.operator():
        space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine"))
        stage.proxy.wait_quiet()
        since = len(stage.proxy.calls)
        with opponent(space, kind, edit):
            space.wait_condition("qwen", condition, "False", "Contested")
            words = f"somebody keeps changing {field} of {kind} qwen-engine"
            wait_until(
                words, lambda: any(words in space.condition("qwen", each)["message"] for each in (condition, "Ready"))
            )
            time.sleep(5)
            assert count_applies(stage, f"{kind.lower()}s", since) <= 8  # without pauses there are 20 a second
        if kind == "Deployment":
            assert space.condition("qwen", "Stalled")["reason"] == "Contested"


def test_a_new_spec_is_applied_without_a_pause(stage: Stage) -> None:
    space, edit = stage.space, {"spec": {"maxReplicas": 50}}
    with stage.operator():
        space.make_service(autoscaling=AUTOSCALING)
        wait_until("the HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine"))
        with opponent(space, "HorizontalPodAutoscaler", edit):
            space.wait_condition("qwen", "ScalingReady", "False", "Contested")
            time.sleep(3)  # into the pause of four seconds
        space.edit("qwen", autoscaling={"maxReplicas": 5})

        def is_applied() -> bool:
            return bool(space.need("HorizontalPodAutoscaler", "qwen-engine")["spec"]["maxReplicas"] == 5)

        wait_until("the new spec", is_applied, 3)
        wait_until("the contest is over", lambda: space.condition("qwen", "ScalingReady")["reason"] != "Contested", 10)


def test_pauses_grow_to_five_minutes_and_a_contest_ends_after_twice_the_pause() -> None:
    contests = [Contest(restores, NOW) for restores in range(1, 16)]
    pauses = [(contest.resumes_at - NOW).total_seconds() for contest in contests]
    assert pauses == [0, 0, 0, 0, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300, 300]
    assert [contest.is_open for contest in contests] == [False] * 4 + [True] * 11
    ends = [contest.ends_at - NOW for contest in contests]
    assert ends[0] == ends[7] == timedelta(minutes=1)
    assert ends[-1] == timedelta(minutes=10)


def test_who_removed_a_field_is_not_known() -> None:
    before: Json = {"metadata": {"managedFields": [{"manager": "tool", "fieldsV1": {"f:spec": {"f:other": {}}}}]}}
    after: Json = {"metadata": {"labels": {"team": "red"}}}
    assert explain(("Service", "a"), before, after).startswith("somebody keeps changing metadata.labels of Service a,")
    assert explain(("Service", "a"), None, after).startswith("somebody keeps deleting Service a,")
    assert explain(("Service", "a"), after, after).startswith("somebody keeps changing Service a,")
