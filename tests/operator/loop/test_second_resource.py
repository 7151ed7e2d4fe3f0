"""Tests a second kind of resource beside the first one on a real API server. It needs a package and a registration."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from tests.operator.loop.widget import CRD, GROUP, LABEL, Widgets
from tests.operator.stage import Json, Stage, wait_until

from conveyor_api import names
from conveyor_operator import process
from conveyor_operator.inferenceservice.resource import InferenceServices


@pytest.fixture(autouse=True)
def registered(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.space.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD['metadata']['name']}", CRD)
    wait_until("its CRD", lambda: stage.space.api.reachable(f"/apis/{GROUP}/v1/widgets"))
    monkeypatch.setattr(process, "build_resources", lambda *settings: (InferenceServices(*settings), Widgets()))


def make_widget(stage: Stage, name: str = "qwen", **spec: Any) -> Json:
    body = {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec}
    return stage.space.create("Widget", body)


def text(stage: Stage, name: str = "qwen-text") -> str:
    found = stage.space.get("ConfigMap", name)
    return str(found["data"]["text"]) if found is not None else ""


def read_message(stage: Stage, name: str = "qwen") -> str:
    return str((stage.space.need("Widget", name).get("status") or {}).get("says"))


def test_two_resources_of_one_name_get_their_own_children_and_statuses(stage: Stage) -> None:
    """Both resources have ConfigMaps."""
    with stage.operator():
        uid = make_widget(stage, text="hello")["metadata"]["uid"]
        stage.space.make_service("qwen")
        wait_until("the widget's", lambda: text(stage) == "hello")
        stage.space.wait_children("qwen")
        wait_until("its status", lambda: read_message(stage) == "hello")
        stage.space.wait_observed("qwen")
        assert ("ConfigMap", "qwen-text") not in stage.space.children("qwen")
        (owner,) = stage.space.need("ConfigMap", "qwen-text")["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("Widget", uid)
        stage.proxy.wait_quiet()
        stage.space.delete("InferenceService", "qwen")
        wait_until("the service's are gone", lambda: not stage.space.children("qwen"))
        assert text(stage) == "hello"
        events = [e for e in stage.space.list("Event") if e["involvedObject"]["kind"] == "Widget"]
        assert [(event["reason"], event["message"]) for event in events] == [("Says", "hello")]


def test_its_children_are_defended_and_follow_its_spec(stage: Stage) -> None:
    with stage.operator():
        make_widget(stage, text="hello")
        wait_until("its ConfigMap", lambda: text(stage) == "hello")
        stage.proxy.wait_quiet()
        stage.space.patch("ConfigMap", "qwen-text", {"data": {"text": "edited"}})
        wait_until("the edit is undone", lambda: text(stage) == "hello")
        stage.space.delete("ConfigMap", "qwen-text")
        wait_until("it is back", lambda: text(stage) == "hello")
        stage.space.patch("Widget", "qwen", {"spec": {"text": "bye"}})
        wait_until("the new text", lambda: text(stage) == "bye")


@pytest.mark.parametrize("label", [LABEL, names.MANAGED_BY_LABEL])
def test_a_lost_label_comes_back_to_a_child_of_a_kind_that_both_have(stage: Stage, label: str) -> None:
    """The API server can select the children of both only by the label that all of them have."""
    with stage.operator():
        make_widget(stage, text="hello")
        wait_until("its ConfigMap", lambda: text(stage) == "hello")
        stage.proxy.wait_quiet()
        stage.space.patch("ConfigMap", "qwen-text", {"metadata": {"labels": {label: None}}})
        wait_until("the label", lambda: label in stage.space.need("ConfigMap", "qwen-text")["metadata"]["labels"])


def test_a_plan_that_requests_a_time_runs_again_then_and_costs_nothing_until_then(stage: Stage) -> None:
    with stage.operator():
        make_widget(stage, "begun", text="hello")
        wait_until("the operator works", lambda: text(stage, "begun-text") == "hello")
        stage.proxy.wait_quiet()
        at = datetime.now(UTC) + timedelta(seconds=2)
        make_widget(stage, text="later", at=at.isoformat())
        wait_until("its ConfigMap", lambda: text(stage) == "later")
        made = stage.space.need("ConfigMap", "qwen-text")["metadata"]["creationTimestamp"]
        assert datetime.fromisoformat(made) >= at.replace(microsecond=0)
    looks = [call for call in stage.proxy.calls if (call.verb, call.resource, call.name) == ("get", "widgets", "qwen")]
    assert len(looks) <= 4, "its creation, its status, its time, its second status"


def test_a_waiting_plan_runs_at_once_when_its_spec_changes(stage: Stage) -> None:
    with stage.operator():
        make_widget(stage, text="later", at=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
        wait_until(
            "it was looked at", lambda: (stage.space.need("Widget", "qwen").get("status") or {}).get("says") == ""
        )
        stage.space.patch("Widget", "qwen", {"spec": {"at": datetime.now(UTC).isoformat()}})
        wait_until("its ConfigMap", lambda: text(stage) == "later")


def test_an_unreadable_spec_is_reported_and_harms_no_other(stage: Stage) -> None:
    with stage.operator():
        make_widget(stage, "bad", text=1)
        make_widget(stage, text="hello")
        wait_until("the good one's", lambda: text(stage) == "hello")
        wait_until("it is told", lambda: read_message(stage, "bad") == "spec.text: must be a string")
