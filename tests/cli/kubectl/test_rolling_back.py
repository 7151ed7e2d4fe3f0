"""Tests `kubectl conveyor rollback-check`, as in docs/operations.md, on a real API server."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.chart.installation import CHART, helm
from tests.operator.deep_objects import create_deep
from tests.operator.stage import Space

from conveyor_kubectl.command import main
from conveyor_kubectl.rolling_back import _find_unknown
from e2e.cluster.api import Api
from e2e.cluster.control_plane import ControlPlane
from e2e.cluster.definitions import install_definitions
from e2e.cluster.paths import REPOSITORY

CRD = REPOSITORY / "crds" / "inferenceservices.conveyor.dev.yaml"
ADAPTERS = [{"name": "sql", "uri": "pvc://adapters/sql"}]


def build_older(*without: str) -> dict[str, Any]:
    """Return the CRD as of a release that lacks these fields of the spec."""
    crd: dict[str, Any] = copy.deepcopy(yaml.safe_load(CRD.read_text()))
    for path in without:
        schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
        *parents, last = path.split(".")
        for parent in parents:
            schema = schema["properties"][parent]
        del schema["properties"][last]
    return crd


def check(plane: ControlPlane, folder: Path, *documents: object) -> int:
    file = folder / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(documents))
    return main(["rollback-check", str(file), f"--kubeconfig={plane.kubeconfig}"])


@pytest.fixture
def space(control_plane: ControlPlane, namespace: str) -> Space:
    api = Api(control_plane.kubeconfig)
    install_definitions(api)
    return Space(api, namespace)


def test_fields_that_a_rollback_drops_are_named(
    control_plane: ControlPlane, space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"uri": "hf://org/m", "cache": {"strategy": "PVC", "size": "9Gi"}}
    space.make_service("chat", adapters=ADAPTERS, model=model)
    space.make_service("plain")
    deployment = {"kind": "Deployment", "metadata": {"name": "conveyor-operator"}}
    assert check(control_plane, tmp_path, deployment, build_older("adapters", "model.cache", "kvCache")) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if space.namespace in line]
    name = f"InferenceService {space.namespace}/chat"
    assert found == [f"{name}: spec.adapters", f"{name}: spec.model.cache"]  # kvCache has only defaults
    assert check(control_plane, tmp_path, build_older()) == 0
    assert capsys.readouterr().out == "no field in use would be dropped, and all values are allowed\n"


def test_values_that_the_older_release_does_not_know_are_named(
    control_plane: ControlPlane, space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space.make_service("chat", engine={"toolParser": "Hermes"})
    space.make_service("plain", engine={"toolParser": "Mistral"})
    older = build_older()
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    spec["properties"]["engine"]["properties"]["toolParser"]["enum"].remove("Hermes")
    assert check(control_plane, tmp_path, older) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if space.namespace in line]
    assert found == [f"InferenceService {space.namespace}/chat: spec.engine.toolParser: Hermes is not allowed"]


def test_a_deep_object_hides_no_other(
    control_plane: ControlPlane, space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_deep(space.namespace, control_plane.kubeconfig, tmp_path)
    space.make_service("chat", adapters=ADAPTERS)
    assert check(control_plane, tmp_path, build_older("adapters", "model.uri")) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if space.namespace in line]
    service = f"InferenceService {space.namespace}"
    assert found == [
        f"{service}/chat: spec.adapters",
        f"{service}/chat: spec.model.uri",
        f"{service}/deep: spec.model.uri",
    ]


@pytest.mark.parametrize("keeps", [{"additionalProperties": True}, {"x-kubernetes-preserve-unknown-fields": True}])
def test_a_schema_that_keeps_every_field_drops_nothing(keeps: dict[str, Any]) -> None:
    kept = {"properties": {"pod": {"type": "object", **keeps}}}
    spec = {"pod": {"affinity": {"terms": [{"key": "a"}]}, "tolerations": [{"key": "b"}]}}
    assert list(_find_unknown(spec, kept, {}, "spec")) == []


def test_manifests_without_crds_are_an_error(
    control_plane: ControlPlane, space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(control_plane, tmp_path, {"kind": "Deployment"}) == 1
    assert "the manifests have no CRD of conveyor.dev" in capsys.readouterr().err


def test_the_manifests_of_the_chart_have_the_crds(control_plane: ControlPlane, space: Space, tmp_path: Path) -> None:
    space.make_service("chat", adapters=ADAPTERS)
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(helm("template", "conveyor", CHART))
    assert main(["rollback-check", str(rendered), f"--kubeconfig={control_plane.kubeconfig}"]) == 0
