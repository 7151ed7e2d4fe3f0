"""Tests profiles: which fields they set, which they must not, and the report if a service's profile is missing."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_body
from tests.operator.builders import SETTINGS
from tests.operator.stage import Stage, wait_until

from conveyor_api.errors import InvalidResource
from conveyor_operator.inferenceservice.profiles import Profiles, read_profiles

L4 = {
    "resources": {"requests": {"cpu": 2}, "limits": {"nvidia.com/gpu": 1}},
    "pod": {
        "nodeSelector": {"gpu": "l4", "disk": "fast"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
    },
}


def fill(profile: Any = L4, **spec: Any) -> tuple[dict[str, Any], list[str]]:
    body, filled = Profiles({"l4": profile}).fill(build_body(profile="l4", **spec))
    return body["spec"], filled


def test_a_profile_fills_what_the_service_leaves_open() -> None:
    spec, filled = fill()
    assert {"resources": spec["resources"], "pod": spec["pod"]} == L4
    assert filled == [
        "pod.nodeSelector.disk", "pod.nodeSelector.gpu", "pod.runtimeClassName", "pod.tolerations",
        "resources.limits.nvidia.com/gpu", "resources.requests.cpu",
    ]  # fmt: skip


def test_what_the_service_says_itself_stays() -> None:
    own = {"nodeSelector": {"gpu": "h200"}, "tolerations": []}
    spec, filled = fill(pod=own, resources={"requests": {"cpu": 4}})
    assert spec["pod"] == {
        "nodeSelector": {"gpu": "h200", "disk": "fast"},
        "tolerations": [],
        "runtimeClassName": "nvidia",
    }
    assert spec["resources"] == {"requests": {"cpu": 4}, "limits": {"nvidia.com/gpu": 1}}
    assert filled == ["pod.nodeSelector.disk", "pod.runtimeClassName", "resources.limits.nvidia.com/gpu"]


def test_a_service_without_a_profile_is_left_as_it_is() -> None:
    body = build_body()
    assert Profiles({"l4": L4}).fill(body) == (body, [])
    assert read_profiles(SETTINGS.profiles).fill(body) == (body, [])


@pytest.mark.parametrize(
    ("profiles", "sentence"),
    [
        ({}, "spec.profile: there is no profile l4; those of the chart (value `profiles`): none"),
        ({"a100": {}, "t4": {}}, "there is no profile l4; those of the chart (value `profiles`): a100, t4"),
        ({"l4": {"pod": {"hostNetwork": True}}}, "is invalid: pod.hostNetwork: unknown field"),
        ({"l4": {"pod": {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}}}, "hostPath: unknown field"),
        ({"l4": {"model": {"uri": "hf://a/b"}}}, "model: unknown field"),
        ({"l4": {"pod": {"labels": {"app.kubernetes.io/name": "x"}}}}, "must not contain Conveyor's own labels"),
        ({"l4": "h200"}, "is invalid"),
    ],
)
def test_a_profile_that_is_missing_or_may_not_be_is_refused(profiles: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidResource, match=re.escape(sentence)):
        Profiles(profiles).fill(build_body(profile="l4"))


def test_a_service_of_a_profile_has_its_fields_and_says_so(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text(yaml.safe_dump({"l4": L4}))
    with stage.operator(profiles=file):
        stage.space.make_service(profile="l4", pod={"nodeSelector": {"gpu": "h200"}})
        stage.space.wait_children("qwen")
        pods = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"]
        assert pods["nodeSelector"] == {"gpu": "h200", "disk": "fast"}
        assert pods["runtimeClassName"] == "nvidia"
        effective = stage.space.wait_observed("qwen")["status"]["effective"]
        assert effective["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        assert "pod.nodeSelector.disk" in effective["fromProfile"]
        stage.space.edit("qwen", profile="h100")
        told = stage.space.wait_condition("qwen", "Ready", "False", "InvalidSpec")
        assert "there is no profile h100; those of the chart (value `profiles`): l4" in told["message"]
        assert stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"] == pods
        stage.space.edit("qwen", profile=None)
        wait_until(
            "pods of its own",
            lambda: "runtimeClassName" not in stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"],
        )
