"""A pod template becomes programs of this machine: folders, variables, flags and shares."""

import base64
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.local.running import build_service

from conveyor_api.resource import InferenceService
from conveyor_local.errors import RunError
from conveyor_local.files import Objects
from conveyor_local.machine import Machine, check_gpus, find_machine
from conveyor_local.places import Places, open_places
from conveyor_local.plans import PodPlanner, Surroundings, build_all
from conveyor_local.processes import ChildProgram
from conveyor_local.service import Options, Service
from conveyor_local.templates import Folders, Missing

GIB = 1 << 30


class FakePod:
    """The parts of a pod that its programs depend on."""

    name, uid, gpus = "chat-engine-1", "1", ["3"]


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    (tmp_path / "models").mkdir()
    found = open_places(tmp_path / "cache", {"models": tmp_path / "models"})
    yield found
    found.lock.close()


def plan(
    body: dict[str, Any], places: Places, objects: Objects | None = None, machine: Machine | None = None
) -> list[ChildProgram]:
    """Return the programs of one pod of the service: the downloads, then the engine."""
    service = InferenceService.parse(body)
    around = Surroundings(places, objects or Objects(), machine or Machine(8, 32 * GIB), {"PATH": "/bin"})
    pods = PodPlanner(service, build_all(service), around).build_plan()
    spec = pods.template["spec"]
    return [pods.build(container, FakePod()) for container in (*spec["initContainers"], *spec["containers"])]  # type: ignore[arg-type]


def flags_of(program: ChildProgram) -> dict[str, str]:
    words = list(program.arguments)
    return {words[at].removeprefix("--"): words[at + 1] for at in range(1, len(words), 2)}


def test_a_claim_is_its_folder_and_a_download_is_in_the_cache(places: Places) -> None:
    adapters = [{"name": "sql", "uri": "hf://example/sql"}, {"name": "fr", "uri": "pvc://models/fr"}]
    fetch, engine = plan(build_service(adapters=adapters), places)
    volume = places.volumes["models"]
    assert flags_of(fetch)["target"] == flags_of(engine)["model"] == str(volume / "chat")
    assert yaml.safe_load(Path(flags_of(engine)["adapters-file"]).read_text()) == {
        "fr": {"uri": "pvc://models/fr", "directory": str(volume / "fr")},
        "sql": {"uri": "hf://example/sql", "directory": f"{places.models}/adapters/hf/example/sql/main"},
    }


def test_a_draft_model_is_where_its_download_is(places: Places) -> None:
    drafts = {"method": "Draft", "draft": {"uri": "hf://example/small"}}
    fetch, small, engine = plan(build_service(model={"uri": "hf://a/b"}, speculation=drafts), places)
    assert flags_of(small)["target"] == flags_of(engine)["draft-model"] == f"{places.models}/hf/example/small/main"
    assert flags_of(fetch)["target"] == flags_of(engine)["model"]


def test_two_services_of_one_model_share_its_folder(places: Places) -> None:
    bodies = (build_service(name, model={"uri": "hf://Qwen/Qwen3-0.6B"}) for name in ("a", "b"))
    assert {flags_of(plan(body, places)[-1])["model"] for body in bodies} == {
        f"{places.models}/hf/Qwen/Qwen3-0.6B/main"
    }


def test_a_cache_of_the_cluster_is_this_cache(places: Places) -> None:
    model = {"uri": "hf://a/b", "cache": {"strategy": "PVC", "claimName": "shared"}}
    assert flags_of(plan(build_service(model=model), places)[0])["target"] == f"{places.models}/hf/a/b/main"


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"model": {"uri": "pvc://other/a"}}, "name its folder here: --volume other=DIR"),
        ({"model": {"uri": "oci://registry.example.com/a:1"}}, "is an image, which only a cluster mounts"),
        ({"runtime": "VLLM", "engine": {"image": "vllm:1"}, "batching": {}}, "runtime VLLM needs vLLM's image"),
    ],
)
def test_what_only_a_cluster_can_run_is_refused_by_name(spec: dict[str, Any], words: str, places: Places) -> None:
    with pytest.raises(RunError, match=words):
        plan(build_service(**spec), places)


def test_a_secret_of_the_files_is_a_folder_of_the_download_alone(places: Places) -> None:
    data = {"token": base64.b64encode(b"hf_1").decode(), "other": ""}
    secret = {"metadata": {"name": "hub"}, "data": data}
    service = build_service(model={"uri": "hf://a/b", "secretRef": {"name": "hub"}})
    fetch, engine = plan(service, places, Objects(secrets={"default/hub": secret}))
    folder = Path(flags_of(fetch)["credentials"])
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"HF_TOKEN": "hf_1"}
    assert "credentials" not in flags_of(engine)


def test_each_mount_of_a_secret_has_its_own_files(places: Places) -> None:
    """A token of the hub is always the file HF_TOKEN, whatever its key is."""
    data = {"token": "MODEL", "sql": "ADAPTER", "other": "OTHER"}
    objects = Objects(secrets={"default/hub": {"metadata": {"name": "hub"}, "stringData": data}})
    adapter = {"name": "sql", "uri": "hf://example/sql", "secretRef": {"name": "hub", "key": "sql"}}
    bodies = (
        build_service(model={"uri": "hf://a/b", "secretRef": {"name": "hub"}}, adapters=[adapter]),
        build_service("other", model={"uri": "hf://a/b", "secretRef": {"name": "hub", "key": "other"}}),
    )
    fetches = [program for body in bodies for program in plan(body, places, objects)[:-1]]
    folders = [Path(flags_of(each)["credentials"]) for each in fetches if "credentials" in flags_of(each)]
    assert [(each / "HF_TOKEN").read_text() for each in folders] == ["MODEL", "ADAPTER", "OTHER"]
    assert {each.name for each in folders} == {"hub"}


def test_a_secret_s_files_are_its_keys_and_only_their_owner_reads_them(places: Places) -> None:
    service = build_service(model={"uri": "s3://models/chat", "secretRef": {"name": "bucket"}})
    keys = {"AWS_ACCESS_KEY_ID": "1", "AWS_SECRET_ACCESS_KEY": "2"}
    for data in (keys | {"AWS_SESSION_TOKEN": "old"}, keys):
        secret = {"metadata": {"name": "bucket"}, "stringData": data}
        fetch, _ = plan(service, places, Objects(secrets={"default/bucket": secret}))
        folder = Path(flags_of(fetch)["credentials"])
        assert {path.name: path.read_text() for path in folder.iterdir()} == data
        assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    plan(service, places)
    assert not list(folder.iterdir())


def test_without_its_secret_a_download_has_an_empty_folder_with_the_secret_s_name(places: Places) -> None:
    fetch, _ = plan(build_service(model={"uri": "hf://a/b", "secretRef": {"name": "hub"}}), places)
    folder = Path(flags_of(fetch)["credentials"])
    assert (folder.name, list(folder.iterdir())) == ("hub", [])


def test_a_variable_of_a_secret_that_is_missing_is_reported(places: Places) -> None:
    variable = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    with pytest.raises(Missing, match='secret "hub" not found'):
        plan(build_service(pod={"env": [variable]}), places)


def test_variables_have_the_values_of_a_pod(places: Places) -> None:
    settings = {"metadata": {"name": "settings"}, "data": {"level": "7"}}
    env = [
        {"name": "LEVEL", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "level"}}},
        {"name": "NONE", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "none", "optional": True}}},
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    objects = Objects(config_maps={"default/settings": settings})
    found = plan(build_service(pod={"env": env}), places, objects)[-1].environment
    assert (found["LEVEL"], found["POD"], "NONE" in found) == ("7", "chat-engine-1", False)
    assert found["PATH"] == "/bin"
    assert "HOME" not in found  # that of the user, not the container's /tmp


def test_a_mounted_config_map_is_a_folder_that_variables_can_name(places: Places) -> None:
    code = {"metadata": {"name": "code"}, "data": {"mine.py": "x = 1"}}
    pod = {
        "volumes": [{"name": "code", "configMap": {"name": "code"}}],
        "volumeMounts": [{"name": "code", "mountPath": "/code"}],
        "env": [{"name": "PYTHONPATH", "value": "/code"}],
    }
    found = plan(build_service(pod=pod), places, Objects(config_maps={"default/code": code}))[-1].environment
    assert (Path(found["PYTHONPATH"]) / "mine.py").read_text() == "x = 1"


@pytest.mark.parametrize("key", ["../mine.py", "/nonexistent/mine.py", "..mine", ""])
def test_a_key_that_leads_out_of_its_folder_is_refused(key: str, places: Places) -> None:
    code = {"metadata": {"name": "code"}, "data": {key: "x = 1"}}
    volumes = [{"name": "code", "configMap": {"name": "code"}}]
    pod = {"volumes": volumes, "volumeMounts": [{"name": "code", "mountPath": "/code"}]}
    with pytest.raises(RunError, match=r"must be letters, digits"):
        plan(build_service(pod=pod), places, Objects(config_maps={"default/code": code}))
    assert not list(places.state.rglob("*mine*"))


def test_without_a_gpu_device_cuda_is_the_cpu_and_the_file_stays(places: Places) -> None:
    service = build_service(engine={"device": "CUDA"}, batching={}, task="Generate")
    flags = flags_of(plan(service, places)[-1])
    assert (flags["device"], flags["max-num-seqs"]) == ("auto", "32")
    (config,) = places.state.glob("default/config-maps/*/engine.yaml")
    assert "device: cuda" in config.read_text()
    assert "device" not in flags_of(plan(service, places, machine=Machine(8, 32 * GIB, ["3"], has_gpus=True))[-1])


def test_an_engine_sees_only_its_gpus(places: Places) -> None:
    with_gpu = Machine(8, 32 * GIB, ["3"], has_gpus=True)
    assert plan(build_service(), places, machine=with_gpu)[-1].environment["CUDA_VISIBLE_DEVICES"] == "3"
    assert "CUDA_VISIBLE_DEVICES" not in plan(build_service(), places)[-1].environment


def test_processors_and_memory_are_divided_among_the_most_engines(places: Places) -> None:
    open_cache = {"kvCache": {}}
    flags = flags_of(plan(build_service(**open_cache), places, machine=Machine(8, 8 * GIB, engines=4))[-1])
    assert (flags["num-threads"], flags["kv-memory-fraction"]) == ("2", "0.212")
    assert "kv-memory-fraction" not in flags_of(plan(build_service(), places, machine=Machine(8, GIB, engines=4))[-1])
    alone = flags_of(plan(build_service(**open_cache), places, machine=Machine(8, 8 * GIB))[-1])
    assert (alone["num-threads"], "kv-memory-fraction" in alone) == ("8", False)


def test_threads_that_the_service_sets_are_kept(places: Places) -> None:
    pod = {"env": [{"name": "OMP_NUM_THREADS", "value": "3"}]}
    assert "num-threads" not in flags_of(plan(build_service(pod=pod), places)[-1])


def test_too_few_gpus_are_reported_by_name() -> None:
    spec = {"resources": {"limits": {"nvidia.com/gpu": 2}}, "replicas": 2}
    service = InferenceService.parse(build_service(**spec))
    with pytest.raises(RunError, match="too few GPUs: default/chat needs 4, and this machine has 3"):
        check_gpus([service], Machine(8, GIB, ["0", "1", "2"], has_gpus=True))
    check_gpus([service], Machine(8, GIB))


def test_this_machine_has_processors_and_memory() -> None:
    found = find_machine({})
    assert found.cpus >= 1
    assert found.free_bytes > 1 << 20


@pytest.mark.parametrize(
    ("spec", "autoscales", "engines"),
    [
        ({"replicas": 2}, True, 2),
        ({"replicas": 0}, True, 0),
        ({"autoscaling": {"minReplicas": 3, "maxReplicas": 4}}, True, 3),
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}, True, 0),  # the first request starts one
        ({"autoscaling": {"minReplicas": 0, "maxReplicas": 4}}, False, 1),
        ({"autoscaling": {"minReplicas": 2, "maxReplicas": 4, "provider": "External"}}, True, 2),
    ],
)
def test_a_run_begins_with_as_many_engines_as_a_cluster_or_with_none_until_a_request(
    spec: dict[str, Any], autoscales: bool, engines: int, places: Places
) -> None:
    around = Surroundings(places, Objects(), Machine(8, GIB), {})
    service = Service(build_service(**spec), around, Options(autoscales, 5, "http://127.0.0.1:8000", print))
    assert service.replicas == engines


def test_paths_are_translated_at_their_start_only() -> None:
    folders = Folders({"/in": Path("/a"), "/in/put": Path("/b")})
    assert folders.translate("--input=/in/put/x") == "--input=/b/x"
    assert folders.translate("/in/x:/in") == "/a/x:/a"
    assert folders.translate("http://host/in") == "http://host/in"
