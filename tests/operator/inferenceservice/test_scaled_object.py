"""Tests `provider: KEDA`: a ScaledObject replaces the HPA if the cluster has KEDA's definition of it."""

from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from tests.operator import scaled_objects
from tests.operator.stage import Space, Stage, wait_until

from conveyor_operator.loop import optional
from e2e.cluster.api import Api, ApiError
from e2e.cluster.paths import REPOSITORY

Json = dict[str, Any]

KEDA = {"provider": "KEDA", "minReplicas": 2, "maxReplicas": 5}
HPA, SCALED_OBJECT = "HorizontalPodAutoscaler", "ScaledObject"


@pytest.fixture(autouse=True)
def looks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optional, "_LOOK_SECONDS", 1.0)


@pytest.fixture
def installed(api: Api) -> Iterator[Api]:
    """The API server with ScaledObjects, which no controller handles."""
    scaled_objects.install(api)
    yield api
    scaled_objects.remove(api)


def test_the_documented_provider_makes_a_scaled_object(stage: Stage, installed: Api) -> None:
    """It is applied with strict validation by KEDA's own definition, as the operator applies all objects."""
    page = (REPOSITORY / "docs" / "keda.md").read_text()
    (block,) = (part.split("```")[0] for part in page.split("```yaml\n") if part.startswith("spec:\n"))
    with stage.operator():
        stage.space.make_service(**yaml.safe_load(block)["spec"])
        found = wait_until("the ScaledObject", lambda: stage.space.get(SCALED_OBJECT, "qwen-engine"))
        assert (found["spec"]["minReplicaCount"], found["spec"]["maxReplicaCount"]) == (1, 4)
    path = stage.space.path(SCALED_OBJECT) + "?fieldValidation=Strict"
    for wrong in ({"triggers": [{"type": "metrics-api"}]}, {"scaleTargetRef": {}}, {"most": 4}):
        with pytest.raises(ApiError):
            installed.create(path, found | {"metadata": {"name": "wrong"}, "spec": found["spec"] | wrong})


def test_a_cluster_without_keda_is_reported_and_a_later_installation_is_noticed(stage: Stage) -> None:
    scaled_objects.remove(stage.space.api)
    with stage.operator():
        stage.space.make_service(autoscaling=KEDA)
        message = stage.space.wait_condition("qwen", "ScalingReady", "False", "KEDANotInstalled")["message"]
        assert "Install KEDA (Conveyor finds it within a minute), or set autoscaling.provider: Native." in message
        wait_until("the Deployment", lambda: count(stage.space) == 2)
        stage.proxy.wait_quiet()
        assert not stage.space.list(HPA)
        scaled_objects.install(stage.space.api)
        wait_until("the ScaledObject", lambda: stage.space.get(SCALED_OBJECT, "qwen-engine"))
        message = stage.space.wait_condition("qwen", "ScalingReady", "Unknown", "WaitingForAutoscaler")["message"]
        assert "check that the Deployment keda-operator runs" in message
        assert not stage.space.list(HPA)
        scaled_objects.remove(stage.space.api)
        stage.space.wait_condition("qwen", "ScalingReady", "False", "KEDANotInstalled")
        assert count(stage.space) == 2


def test_what_keda_says_is_judged(stage: Stage, installed: Api) -> None:
    space = stage.space
    with stage.operator(metrics_api=True, system_namespace=space.namespace):
        space.make_service(autoscaling=KEDA)
        wait_until("the ScaledObject", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        scaled_objects.judge(space, Ready=("False", "ScaledObjectCheckFailed", "no such trigger"))
        message = space.wait_condition("qwen", "ScalingReady", "False", "AutoscalerFailed")["message"]
        assert message == "ScaledObjectCheckFailed: no such trigger"
        scaled_objects.judge(space, Ready=("True", "ScaledObjectReady", ""), Paused=("True", "ScaledObjectPaused", ""))
        wait_until("paused", lambda: "is paused" in space.condition("qwen", "ScalingReady")["message"])
        scaled_objects.take_up(space)
        message = space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")["message"]
        assert "external metric" in message  # of the real HPA controller: there is no external.metrics.k8s.io here
        stage.proxy.wait_quiet()
        assert space.need("InferenceService", "qwen")["status"]["autoscaling"]["reason"] == "NoMetrics"


def test_without_a_metrics_server_the_remedy_is_reported_instead_of_kedas_error(stage: Stage, installed: Api) -> None:
    """First the HPA reports that it has no metric, and then KEDA does."""
    space = stage.space
    with stage.operator(metrics_api=False):
        space.make_service(autoscaling=KEDA)
        wait_until("the ScaledObject", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        scaled_objects.take_up(space)
        message = space.wait_condition("qwen", "ScalingReady", "False", "MetricsUnavailable")["message"]
        assert "Set metrics.enabled: true, or autoscaling.provider: External." in message
        scaled_objects.judge(space, Ready=("False", "TriggerError", "Triggers are not working correctly"))
        stage.proxy.wait_quiet()
        assert space.condition("qwen", "ScalingReady")["message"] == message


def test_a_scaled_object_that_somebody_edits_or_deletes_is_restored(stage: Stage, installed: Api) -> None:
    space = stage.space
    with stage.operator():
        space.make_service(autoscaling=KEDA)
        first = wait_until("the ScaledObject", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        scaled_objects.take_up(space)
        stage.proxy.wait_quiet()
        assert not [event for event in space.list("Event") if event["reason"] == "ChildRestored"]
        space.patch(SCALED_OBJECT, "qwen-engine", {"spec": {"maxReplicaCount": 9}})
        wait_until("5 again", lambda: space.need(SCALED_OBJECT, "qwen-engine")["spec"]["maxReplicaCount"] == 5)
        space.edit("qwen", autoscaling={"maxReplicas": 7})
        wait_until("7", lambda: space.need(SCALED_OBJECT, "qwen-engine")["spec"]["maxReplicaCount"] == 7)
        space.delete(SCALED_OBJECT, "qwen-engine")
        scaled_objects.unfinish(space)
        again = wait_until("another", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        assert again["metadata"]["uid"] != first["metadata"]["uid"]


@pytest.mark.slow
def test_there_is_never_an_autoscaler_of_both_and_the_replicas_stay(stage: Stage, installed: Api) -> None:
    """KEDA's operator does not run, so it never finishes the deletion of the ScaledObject."""
    space = stage.space
    with stage.operator():
        space.make_service(autoscaling={"maxReplicas": 5})
        wait_until("the HPA", lambda: owner(space) == ["InferenceService"])
        space.patch("Deployment", "qwen-engine", {"spec": {"replicas": 4}}, "scale")
        space.edit("qwen", autoscaling={"provider": "KEDA"})
        wait_until("the ScaledObject", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        assert not space.list(HPA)
        scaled_objects.take_up(space)
        for provider, expected in (("Native", ["InferenceService"]), ("KEDA", []), ("External", [])):
            space.edit("qwen", autoscaling={"provider": provider})
            space.wait_observed("qwen")
            wait_until(f"the autoscaler of {provider}", lambda expected=expected: owner(space) == expected)
            assert count(space) == 4
        assert space.need(SCALED_OBJECT, "qwen-engine")["metadata"]["deletionTimestamp"]
        scaled_objects.unfinish(space)
        wait_until("its end", lambda: not space.list(SCALED_OBJECT))
        space.edit("qwen", autoscaling={"provider": "KEDA"})
        wait_until("another", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        scaled_objects.take_up(space)
        space.edit("qwen", autoscaling=None)
        space.wait_condition("qwen", "ScalingReady", "True", "FixedReplicas")
        assert (count(space), space.list(HPA)) == (4, [])
        assert "keeps its 4 replicas" in space.condition("qwen", "ScalingReady")["message"]


def test_one_of_somebody_else_keeps_what_keda_has_made_of_it(stage: Stage, installed: Api) -> None:
    """The other one is made after ours and like it, including the labels, but scales differently."""
    space = stage.space
    with stage.operator():
        space.make_service(autoscaling=KEDA)
        ours = wait_until("the ScaledObject", lambda: space.get(SCALED_OBJECT, "qwen-engine"))
        space.edit("qwen", autoscaling={"provider": "External"})
        wait_until("its end", lambda: not space.list(SCALED_OBJECT))
        metadata = {key: ours["metadata"][key] for key in ("name", "labels")}
        space.create(SCALED_OBJECT, ours | {"metadata": metadata, "spec": ours["spec"] | {"maxReplicaCount": 9}})
        scaled_objects.take_up(space)
        stage.proxy.wait_quiet()
    with stage.operator():
        space.edit("qwen", drain={"timeout": "3s"})
        space.wait_observed("qwen")
        stage.proxy.wait_quiet()
        assert [hpa["spec"]["maxReplicas"] for hpa in space.list(HPA)] == [9]


def owner(space: Space) -> list[str]:
    """Return the kinds of the HPAs' owners."""
    return [hpa["metadata"]["ownerReferences"][0]["kind"] for hpa in space.list(HPA)]


def count(space: Space) -> int:
    return int((space.get("Deployment", "qwen-engine") or {"spec": {}})["spec"].get("replicas", 0))
