"""Tests that an upgrade of Conveyor restarts no engine. If a spec replaces the pods anyway, they get the new image."""

from dataclasses import replace
from typing import Any

from tests.operator.builders import NOW, SETTINGS, build_one, make_resource

from conveyor_operator.inferenceservice.desired import build_desired
from conveyor_operator.inferenceservice.observed import DeploymentState, Observed, observe_deployment
from conveyor_operator.inferenceservice.starts import PodStarts

OLD, NEW = SETTINGS.engine_image, "example/engine:2"


def live(**spec: Any) -> DeploymentState:
    return observe_deployment(build_one("Deployment", **spec))


def choose(deployment: DeploymentState | None, **spec: Any) -> str | None:
    """Return the image that an operator with a new default chooses."""
    settings = replace(SETTINGS, engine_image=NEW)
    return build_desired(
        make_resource(**spec), settings, Observed(deployment=deployment), PodStarts(), NOW
    ).effective.image


def test_a_new_default_does_not_touch_running_pods() -> None:
    assert choose(live()) == OLD


def test_scaling_is_no_reason_for_another_image() -> None:
    assert choose(live(), replicas=5) == OLD
    assert choose(live(), autoscaling={"maxReplicas": 4}) == OLD
    assert choose(live(), queue={"maxRequests": 7}) == OLD


def test_pods_that_are_replaced_anyway_take_the_new_default() -> None:
    assert choose(live(), batching={"maxBatchSize": 8}) == NEW
    assert choose(live(), drain={"timeout": "9s"}) == NEW


def test_an_image_in_the_spec_wins() -> None:
    assert choose(live(), engine={"image": "mine/engine:7"}) == "mine/engine:7"


def test_an_image_that_leaves_the_spec_leaves_the_pods() -> None:
    assert choose(live(engine={"image": OLD})) == NEW


def test_a_service_without_a_deployment_gets_the_default() -> None:
    assert choose(None) == NEW


def test_an_image_that_was_edited_by_hand_is_not_kept() -> None:
    assert choose(replace(live(), engine_image="edited/engine:1")) == NEW


def test_another_runtime_has_its_own_image_and_keeps_the_fetch_s_over_an_upgrade() -> None:
    vllm: dict[str, Any] = {"runtime": "VLLM", "engine": {"image": "vllm/vllm-openai:v1"}}
    settings = replace(SETTINGS, engine_image=NEW)
    desired = build_desired(make_resource(**vllm), settings, Observed(deployment=live(**vllm)), PodStarts(), NOW)
    (deployment,) = [child for child in desired.children if child["kind"] == "Deployment"]
    pods = deployment["spec"]["template"]["spec"]
    assert (pods["containers"][0]["image"], desired.effective.image) == ("vllm/vllm-openai:v1",) * 2
    assert pods["initContainers"][0]["image"] == OLD
