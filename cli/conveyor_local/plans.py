"""Plans the pods of a service: the operator's pod template, and what differs on this machine. Used by `service`.

The engine's configuration file has the bytes of the cluster's ConfigMap. What is different here comes as flags, which
win over the file: address and port, the model's folder, the share of processors and memory, and the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from conveyor_api import names
from conveyor_api.resource import InferenceService
from conveyor_local.errors import RunError
from conveyor_local.files import Objects
from conveyor_local.machine import Machine, count_gpus
from conveyor_local.places import Places
from conveyor_local.pod import Pod, PodPlan
from conveyor_local.processes import ChildProgram
from conveyor_local.templates import (
    Folders,
    Missing,
    Object,
    PodFields,
    build_environment,
    find_folders,
    find_volume,
    list_arguments,
)
from conveyor_operator.inferenceservice.desired import Desired, build_desired
from conveyor_operator.inferenceservice.manifests.config import build_engine_config
from conveyor_operator.inferenceservice.manifests.pods import ENGINE_CONTAINER
from conveyor_operator.inferenceservice.manifests.program import PRE_STOP_SECONDS
from conveyor_operator.inferenceservice.observed import Observed
from conveyor_operator.inferenceservice.starts import PodStarts
from conveyor_operator.settings import Settings

_THREADS: Final = frozenset(("OMP_NUM_THREADS", f"{names.ENGINE_ENV_PREFIX}NUM_THREADS"))


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the pods of all services share. `inherited`: the environment of this process."""

    places: Places
    objects: Objects
    machine: Machine
    inherited: dict[str, str]


def build_all(service: InferenceService) -> Desired:
    """Return what the operator would apply for a new service."""
    return build_desired(service, Settings(), Observed(), PodStarts(), datetime.now(UTC))


def adapt(service: InferenceService, machine: Machine) -> InferenceService:
    """Return the service as this machine runs it: without a GPU, device CUDA becomes Auto, which is the CPU."""
    if machine.has_gpus or service.spec.engine.device != "CUDA":
        return service
    engine = service.spec.engine.model_copy(update={"device": "Auto"})
    return service.model_copy(update={"spec": service.spec.model_copy(update={"engine": engine})})


class PodPlanner:
    """Builds the programs of one service's pods."""

    def __init__(self, service: InferenceService, desired: Desired, around: Surroundings) -> None:
        if service.spec.runtime == "VLLM":
            raise RunError(f"{service.key}: runtime VLLM needs vLLM's image, which only a cluster runs")
        self._service = service
        self._around = around
        children = {(child["kind"], child["metadata"]["name"]): child for child in desired.children}
        maps = {name: child for (kind, name), child in children.items() if kind == "ConfigMap"}
        around.objects.config_maps.update({f"{service.namespace}/{name}": child for name, child in maps.items()})
        files = {key: content for child in maps.values() for key, content in child["data"].items()}
        self._owner = desired.owner
        self._config: str = files[names.ENGINE_CONFIG_KEY]
        self._adapters: str = files.get(names.ADAPTER_LIST_KEY, "")
        self._template = children["Deployment", names.engine_name(service.name)]["spec"]["template"]
        for container in self._containers():  # a volume that is missing is found before anything starts
            self._find_folders(container)

    def build_plan(self) -> PodPlan:
        machine, service = self._around.machine, self._service
        return PodPlan(
            namespace=service.namespace,
            template=self._template,
            build=self._build_program,
            folder=self.folder,
            grace_seconds=self._template["spec"]["terminationGracePeriodSeconds"] - PRE_STOP_SECONDS,
            gpus=count_gpus(service, machine),
            take_gpus=machine.take_gpus,
            give_gpus_back=machine.give_back,
        )

    @property
    def folder(self) -> Path:
        return self._around.places.state / self._service.namespace

    def _containers(self) -> Iterator[Object]:
        yield from self._template["spec"]["initContainers"]
        yield from self._template["spec"]["containers"]

    def _find_folders(self, container: Object) -> Folders:
        places = self._around.places

        def find(volume: Object) -> Path:
            claim = volume.get("persistentVolumeClaim") or {}
            if volume["name"] == names.MODEL_VOLUME and "image" not in volume and not claim.get("readOnly"):
                return places.models  # downloads: the cache, whatever volume a cluster would have for it
            if volume["name"] == names.ADAPTERS_VOLUME:
                return places.models / names.ADAPTERS_VOLUME
            try:
                owner = f"services/{self._service.name}"
                return find_volume(volume, self._service.namespace, owner, places, self._around.objects)
            except RunError as error:
                raise RunError(f"{self._service.key}: {error}", error.code) from error
            except Missing:  # reported when the pod starts, as in a cluster
                return Path("/nonexistent")

        return find_folders(self._template, container, find)

    def _build_program(self, container: Object, pod: Pod) -> ChildProgram:
        folders = self._find_folders(container)
        fields = PodFields(self._service.namespace, pod.name, pod.uid, names.engine_name(self._service.name))
        environment = build_environment(container, fields, folders, self._around.objects, self._around.inherited)
        arguments = list(list_arguments(container, folders))
        if container["name"] == ENGINE_CONTAINER:
            arguments += self._list_flags(folders, environment)
            if self._around.machine.has_gpus:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(pod.gpus)
        return ChildProgram(container["command"][2], arguments, environment)

    def _list_flags(self, folders: Folders, environment: dict[str, str]) -> Iterator[str]:
        """Yield the flags for what differs from the configuration file."""
        for name, value in self._find_differences(folders, environment).items():
            yield f"--{name.replace('_', '-')}"
            yield str(value)

    def _find_differences(self, folders: Folders, environment: dict[str, str]) -> dict[str, Any]:
        machine, spec = self._around.machine, self._service.spec
        content: dict[str, Any] = yaml.safe_load(self._config)
        here = yaml.safe_load(build_engine_config(self._owner, adapt(self._service, machine).spec).text)
        found = {name: value for name, value in here.items() if content.get(name) != value}
        found |= {"host": "127.0.0.1", "port": 0, "model": folders.translate(spec.model.source.directory)}
        if (draft := spec.draft_model) is not None:
            found["draft_model"] = folders.translate(draft.source.directory)
        if self._adapters:
            found |= {"adapters_file": self._write_adapters(folders), "adapters_folder": ""}
        if not environment.keys() & _THREADS:
            found["num_threads"] = machine.threads
        if (fraction := machine.find_kv_fraction(self._service)) is not None:
            found["kv_memory_fraction"] = fraction
        return found

    def _write_adapters(self, folders: Folders) -> Path:
        """Write the list of adapters with the folders of this machine, which later runs use again."""
        content = yaml.safe_load(self._adapters)
        for each in content.values():
            each["directory"] = folders.translate(each["directory"])
        path = self.folder / f"{self._service.name}-{names.ADAPTER_LIST_KEY}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content))
        return path
