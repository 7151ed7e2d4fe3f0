"""What is read from files, and each mistake in one sentence."""

import io
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.api.builders import build_full_body
from tests.cli.local.running import build_service
from tests.gateway.keys import make_api_key

from conveyor_local.command import main
from conveyor_local.effects import NO_EFFECT, list_without_effect
from conveyor_local.errors import RunError
from conveyor_local.files import read_objects

JOB: dict[str, Any] = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "night"}}


def write(folder: Path, *objects: Any) -> str:
    path = folder / "objects.yaml"
    path.write_text(yaml.safe_dump_all(objects))
    return str(path)


def test_files_folders_lists_and_standard_input_are_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "one.yaml").write_text(yaml.safe_dump(build_service("one")))
    (tmp_path / "folder" / "notes.txt").write_text("no YAML: [")
    listed = {"apiVersion": "v1", "kind": "List", "items": [build_service("two")]}
    other = {**build_service("three"), "metadata": {"name": "three", "namespace": "team"}}
    stdin = io.StringIO(yaml.safe_dump(other))
    paths = (str(tmp_path / "folder"), write(tmp_path, listed, None), "-")
    assert list(read_objects(paths, "mine", stdin).services) == ["mine/one", "mine/two", "team/three"]


def test_secrets_config_maps_and_jobs_are_kept_and_others_are_named(tmp_path: Path) -> None:
    program = {"command": ["python", "-m", "conveyor_jobs"]}
    template = {"spec": {"containers": [program]}}
    objects = read_objects(
        (
            write(
                tmp_path,
                build_service(),
                {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "hub"}},
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "code"}},
                {**JOB, "spec": {"template": template}},
                {**JOB, "metadata": {"name": "other"}},
                {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "chat"}},
            ),
        )
    )
    assert (list(objects.secrets), list(objects.config_maps)) == (["default/hub"], ["default/code"])
    assert list(objects.jobs) == ["default/night"]
    assert objects.skipped == ["Job default/other", "Service default/chat"]


def test_keys_are_read_and_checked(tmp_path: Path) -> None:
    key = make_api_key("default")
    assert list(read_objects((write(tmp_path, build_service(), key),)).keys) == ["default/ci"]
    wrong = make_api_key("default", services=["No Name"])
    with pytest.raises(RunError, match=r"APIKey default/ci: spec.services\[0\]: must be the name of a service"):
        read_objects((write(tmp_path, build_service(), wrong),))


BAD_FILES = {
    "no such file": ([], "cannot read", "No such file or directory"),
    "two of one name": ([build_service(), build_service()], "there are two objects InferenceService default/chat"),
    "no name": ([{"kind": "InferenceService", "metadata": {}}], "an object without metadata.name"),
    "a name in capitals": ([build_service("Chat")], "'default/Chat' must be a namespace and a name"),
    "no object": (["text"], "a document must be an object, not 'text'"),
    "no service": ([JOB], "there is no InferenceService in", "Job default/night have no use here"),
    "an unknown field": ([build_service(size=1)], 'strict decoding error: unknown field "spec.size"'),
    "a wrong value": ([build_service(replicas=-1)], "spec.replicas in body should be greater than or equal to 0"),
}


@pytest.mark.parametrize("title", BAD_FILES)
def test_a_wrong_file_is_reported_in_one_sentence(
    title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    objects, *words = BAD_FILES[title]
    path = write(tmp_path, *objects) if objects else str(tmp_path / "missing.yaml")
    assert main(["run", path]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("conveyor run: ")
    assert printed.count("\n") == 1
    assert all(word in printed for word in words), printed


def test_a_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(RunError, match=r"bad\.yaml is not YAML"):
        read_objects((str(tmp_path / "bad.yaml"),))


def test_a_date_is_a_text_as_for_kubectl(tmp_path: Path) -> None:
    body = yaml.safe_dump(build_service(pod={"annotations": {"day": "DAY"}}))
    (tmp_path / "dates.yaml").write_text(body.replace("DAY", "2026-11-29"))
    (service,) = read_objects((str(tmp_path / "dates.yaml"),)).services.values()
    assert service["spec"]["pod"]["annotations"] == {"day": "2026-11-29"}


@pytest.mark.parametrize("value", ["&a [*a]", "!!binary aGk=", "!!set {a}", "[" * 3_000])
def test_a_value_that_json_cannot_express_is_reported_in_one_sentence(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text(yaml.safe_dump(build_service(task="TASK")).replace("TASK", value))
    assert main(["run", str(tmp_path / "bad.yaml")]) == 2
    printed = capsys.readouterr().err
    assert (printed.startswith("conveyor run: "), printed.count("\n")) == (True, 1), printed


# Members of the spec that a run follows, whatever is in them.
FOLLOWED = {
    "adapters", "autoscaling", "batching", "drain", "engine", "kvCache", "listed", "model", "pod", "queue", "replicas",
    "requestTimeout", "runtime", "speculation", "task", "workload",
}  # fmt: skip


def test_every_field_is_followed_or_listed_as_without_effect() -> None:
    spec = build_full_body()["spec"]
    listed = {path.partition(".")[0] for path in NO_EFFECT}
    assert spec.keys() <= FOLLOWED | listed
    pod = {f"pod.{name}" for name in spec["pod"]} - {"pod.env", "pod.volumes", "pod.volumeMounts"}
    assert pod <= set(NO_EFFECT)


def test_a_field_without_effect_is_listed_if_it_is_set() -> None:
    pod = {"nodeSelector": {"zone": "a"}, "labels": {}, "env": [{"name": "A", "value": "1"}]}
    limits = {"cpu": 1, "nvidia.com/gpu": 1}
    service = build_service(pod=pod, rollout={"maxSurge": 1}, resources={"limits": limits})
    assert list_without_effect(service) == ["rollout", "resources.limits.cpu", "pod.nodeSelector"]
