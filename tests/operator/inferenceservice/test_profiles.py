"""Tests profiles: which fields they set, which they must not, and the report if a service's profile is missing.

One test reads the example in docs/operations.md.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_body
from tests.operator.builders import SETTINGS
from tests.operator.stage import Stage, wait_until

from conveyor_api.errors import InvalidResource
from conveyor_api.resource import InferenceService
from conveyor_operator.inferenceservice.profiles import Profiles, read_profiles
from e2e.cluster.paths import REPOSITORY

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


def fill_with_default(default: Any, **spec: Any) -> tuple[dict[str, Any], list[str]]:
    body, filled = Profiles({"l4": L4, "default": default}).fill(build_body(**spec))
    return body["spec"], filled


def test_the_profile_default_is_for_all_services_and_yields_to_the_others() -> None:
    default = {"pod": {"nodeSelector": {"gpu": "any", "zone": "a"}, "imagePullSecrets": [{"name": "mirror"}]}}
    spec, filled = fill_with_default(default)
    assert spec["pod"] == default["pod"]
    assert filled == ["pod.imagePullSecrets[mirror]", "pod.nodeSelector.gpu", "pod.nodeSelector.zone"]
    spec, filled = fill_with_default(default, profile="l4", pod={"nodeSelector": {"disk": "own"}})
    assert spec["pod"]["nodeSelector"] == {"disk": "own", "gpu": "l4", "zone": "a"}
    assert "pod.runtimeClassName" in filled
    assert fill_with_default(default, profile="default") == (
        {**build_body(profile="default")["spec"], "pod": default["pod"]},
        fill_with_default(default)[1],
    )


def test_entries_with_a_key_are_merged_and_the_service_s_own_count() -> None:
    pod = {
        "env": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}, {"name": "LEVEL", "value": "1"}],
        "imagePullSecrets": [{"name": "mirror"}],
        "volumes": [{"name": "authorities", "configMap": {"name": "authorities"}}],
        "volumeMounts": [{"name": "authorities", "mountPath": "/authorities"}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    }
    own = {
        "env": [{"name": "LEVEL", "value": "2"}, {"name": "URL", "value": "$(HTTPS_PROXY)/x"}],
        "volumeMounts": [{"name": "mine", "mountPath": "/mine"}],
        "imagePullSecrets": [],
        "tolerations": [{"key": "own", "operator": "Exists"}],
    }
    spec, filled = fill_with_default({"pod": pod}, pod=own)
    assert spec["pod"] == {
        "env": [pod["env"][0], *own["env"]],  # so that the variable of the service can refer to the profile's
        "imagePullSecrets": pod["imagePullSecrets"],
        "volumes": pod["volumes"],
        "volumeMounts": [*pod["volumeMounts"], *own["volumeMounts"]],
        "tolerations": own["tolerations"],
    }
    assert filled == [
        "pod.env[HTTPS_PROXY]", "pod.imagePullSecrets[mirror]", "pod.volumeMounts[/authorities]",
        "pod.volumes[authorities]",
    ]  # fmt: skip


def test_a_long_path_fits_into_the_status() -> None:
    labels = {f"{'x' * 60}.{'y' * 60}.{'z' * 60}.{'w' * 60}/{'n' * 63}": "a"}
    _, filled = fill_with_default({"pod": {"nodeSelector": labels}})
    assert [len(path) for path in filled] == [253]


@pytest.mark.parametrize("env", ["text", {"name": "A"}, [None, 1, "A"], [{"value": "1"}]])
def test_lists_of_the_service_that_are_wrong_stay_for_the_check_of_the_spec(env: Any) -> None:
    spec, _ = fill_with_default({"pod": {"env": [{"name": "B", "value": "1"}]}}, pod={"env": env})
    assert spec["pod"]["env"] == (env if not isinstance(env, list) else [{"name": "B", "value": "1"}, *env])


def test_the_page_s_default_is_a_profile() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    (example,) = [text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "  default:\n    pod:" in text]
    default = yaml.safe_load(example)["profiles"]["default"]
    spec, filled = fill_with_default(default)
    assert spec["pod"] == default["pod"]
    assert len(filled) == 6
    InferenceService.parse({**build_body(), "spec": spec})


def test_the_page_s_profile_adds_labels_to_all_children() -> None:
    page = (REPOSITORY / "docs/operations.md").read_text()
    (example,) = re.findall(r"^```yaml\n(profiles:\n  default:\n    metadata:.*?)^```", page, re.MULTILINE | re.DOTALL)
    service, filled = Profiles(yaml.safe_load(example)["profiles"]).parse(build_body())
    assert (service.spec.metadata.labels, service.spec.pod.labels) == ({"cost-center": "42"}, {"cost-center": "42"})
    assert "metadata.labels.cost-center" in filled


def test_a_profile_with_namespaces_does_not_exist_for_others() -> None:
    profiles = Profiles(
        {"l4": L4 | {"namespaces": ["team-a", "team-b"]}, "t4": {}, "default": {"namespaces": ["team"], **L4}}
    )

    def fill_in(namespace: str, **spec: Any) -> dict[str, Any]:
        body = build_body(**spec)
        filled: dict[str, Any] = profiles.fill(body | {"metadata": {**body["metadata"], "namespace": namespace}})[0]
        return filled["spec"]

    assert fill_in("team-b", profile="l4") == build_body(profile="l4", **L4)["spec"]
    with pytest.raises(
        InvalidResource, match=re.escape("there is no profile l4; those of the chart (value `profiles`): t4")
    ):
        fill_in("team-c", profile="l4")
    assert fill_in("team")["pod"] == L4["pod"]  # `default`
    assert "pod" not in fill_in("team-c")


def test_a_wrong_default_is_reported_to_every_service() -> None:
    with pytest.raises(InvalidResource, match="profile default of the chart"):
        fill_with_default({"pod": {"hostNetwork": True}})


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


APPARMOR = {"container.apparmor.security.beta.kubernetes.io/engine": "localhost/engine"}


def test_only_a_profile_may_set_annotations_that_the_node_reads(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    file.write_text(yaml.safe_dump({"guarded": {"pod": {"annotations": APPARMOR}}}))
    with stage.operator(profiles=file):
        stage.space.make_service(profile="guarded", pod={"annotations": {"example.com/team": "a"}})
        stage.space.wait_children("qwen")
        template = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]
        assert template["metadata"]["annotations"].items() >= {**APPARMOR, "example.com/team": "a"}.items()


def test_annotations_from_before_the_rule_are_refused_beside_a_profile() -> None:
    body = build_body(profile="l4", pod={"annotations": APPARMOR})
    with pytest.raises(InvalidResource, match="a profile may set them"):
        Profiles({"l4": L4}).parse(body)


def test_a_service_of_a_profile_has_its_fields_and_says_so(stage: Stage, tmp_path: Path) -> None:
    file = tmp_path / "profiles.yaml"
    proxy = {"name": "HTTPS_PROXY", "value": "http://proxy:3128"}
    file.write_text(yaml.safe_dump({"l4": L4, "default": {"pod": {"env": [proxy]}}}))
    with stage.operator(profiles=file):
        stage.space.make_service(profile="l4", pod={"nodeSelector": {"gpu": "h200"}})
        stage.space.wait_children("qwen")
        pods = stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"]
        assert pods["nodeSelector"] == {"gpu": "h200", "disk": "fast"}
        assert pods["runtimeClassName"] == "nvidia"
        assert all(proxy in container["env"] for container in [*pods["containers"], *pods["initContainers"]])
        effective = stage.space.wait_observed("qwen")["status"]["effective"]
        assert effective["resources"]["limits"] == {"nvidia.com/gpu": "1"}
        assert "pod.nodeSelector.disk" in effective["fromProfile"]
        stage.space.edit("qwen", profile="h100")
        condition = stage.space.wait_condition("qwen", "Ready", "False", "InvalidSpec")
        assert "there is no profile h100; those of the chart (value `profiles`): default, l4" in condition["message"]
        assert stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"] == pods
        stage.space.edit("qwen", profile=None)
        wait_until(
            "pods of its own",
            lambda: "runtimeClassName" not in stage.space.need("Deployment", "qwen-engine")["spec"]["template"]["spec"],
        )
