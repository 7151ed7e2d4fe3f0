"""What the operator keeps of an engine pod. Pure: a pod's dictionary in, frozen values out.

`watches` converts every watched pod with `observe_pod`. `failures` and `conditions` use the result.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, get_args

from conveyor_api import names
from conveyor_api.engine import Task
from conveyor_api.status import MAX_CONTEXT_LENGTH, MAX_WEIGHT_BYTES
from conveyor_operator.inferenceservice.replica_sets import TEMPLATE_LABEL

Object = Mapping[str, Any]

_TASK = re.compile(r"[A-Za-z0-9_-]{1,63}", re.ASCII)
_FORMAT = re.compile(r"[A-Za-z0-9 ._:-]{1,63}", re.ASCII)
_TASKS = {task.lower(): task for task in get_args(Task)}  # an engine's image may support further tasks
_OF_ADAPTERS = re.compile(rf"{names.ADAPTERS_PATH}/(?:claims/[^/]+|images/(?P<adapter>[^/]+))")
_NO_NODE = ("Unschedulable", "SchedulingGated")  # the second has no transition time
_ENDED = frozenset({"Succeeded", "Failed"})  # phases of pods that hold nothing of their node


@dataclass(frozen=True, slots=True)
class ContainerState:
    """One container of a pod: its current state, and how it last ended."""

    name: str
    image: str = ""
    adapter: str = ""
    """Name of the adapter that it fetches; "" for other containers."""
    initial: bool = False
    """Whether it runs to its end: an initContainer, or the main container of a Job."""
    ready: bool = False
    running: bool = False
    waiting_reason: str = ""
    waiting_message: str = ""
    ended: bool = False
    """Whether it has ended, now or before a restart. The last five fields describe that end."""
    restarts: int = 0
    exit_code: int = 0
    ended_reason: str = ""
    ended_message: str = ""
    started_at: str = ""
    ended_at: str = ""

    @property
    def title(self) -> str:
        """Return its name for messages."""
        return f"{self.name} of adapter {self.adapter}" if self.adapter else self.name


@dataclass(frozen=True, slots=True)
class MountedAdapter:
    """A claim or an image that contains adapters. name: the adapter in an image; "" for those in a claim."""

    name: str
    volume: str
    claim: str = ""
    image: str = ""


@dataclass(frozen=True, slots=True)
class PodState:
    """One engine pod."""

    name: str
    uid: str = ""
    namespace: str = ""
    config_hash: str = ""
    template_label: str = ""
    """The value of `TEMPLATE_LABEL`, which is the same in all pods of one ReplicaSet."""
    model_image: str = ""
    """Reference of the image that contains the model; "" without one."""
    mounted_adapters: tuple[MountedAdapter, ...] = ()
    ready: bool = False
    leaving: bool = False
    prewarms: bool = False
    """Whether the pod belongs to a Job that downloads the model, so it runs no engine."""
    checks: bool = False
    """Whether the pod belongs to a Job that tries the image and the configuration of engines."""
    phase: str = ""
    reason: str = ""
    message: str = ""
    created_at: str = ""
    scheduled_at: str = ""
    """When it was assigned to a node; "" if it was not."""
    ready_at: str = ""
    """When it became Ready; "" if it is not Ready."""
    node: str = ""
    lost_at: str = ""
    """When Kubernetes marked it as not ready because its node had stopped reporting; "" if it did not."""
    unschedulable: str = ""
    """Why the pod cannot be scheduled: the message of the scheduler or of scheduling gates; "" otherwise."""
    unschedulable_at: str = ""
    containers: tuple[ContainerState, ...] = ()

    @property
    def held_since_unix(self) -> float | None:
        """Since when an engine has held a place on a node; None if the pod holds none or runs no engine."""
        if self.prewarms or self.checks or self.phase in _ENDED:
            return None
        try:
            return datetime.fromisoformat(self.scheduled_at).timestamp()
        except (ValueError, OverflowError):  # "", or what somebody else wrote
            return None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a fetch has found in the model's files. A field is None if it is unknown."""

    context_length: int | None = None
    task: str | None = None
    quantization: str | None = None
    weight_bytes: int | None = None


def find_facts(pods: Iterable[PodState]) -> ModelFacts:
    """Return the model's facts from the first fetch whose termination message contains some."""
    endings = (c.ended_message for pod in pods for c in pod.containers if c.initial and c.ended and c.exit_code == 0)
    return next((facts for facts in map(_read_facts, endings) if facts != ModelFacts()), ModelFacts())


def parse_message(message: str) -> dict[str, Any]:
    """Return the JSON object in a termination message; empty for other texts, which tenants' images may write."""
    try:
        fields = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _read_facts(message: str) -> ModelFacts:
    fields = parse_message(message)
    length, task = fields.get("contextLength"), fields.get("task")
    quantization, size = fields.get("quantization"), fields.get("weightBytes")
    return ModelFacts(
        length if type(length) is int and 2 <= length <= MAX_CONTEXT_LENGTH else None,
        _TASKS.get(task, task) if isinstance(task, str) and _TASK.fullmatch(task) else None,
        quantization if isinstance(quantization, str) and _FORMAT.fullmatch(quantization) else None,
        size if type(size) is int and 1 <= size <= MAX_WEIGHT_BYTES else None,
    )


def observe_pod(body: Object) -> PodState:
    metadata, status = body["metadata"], body.get("status") or {}
    conditions: dict[str, Object] = {c["type"]: c for c in status.get("conditions") or ()}
    scheduled, ready = conditions.get("PodScheduled", {}), conditions.get("Ready", {})
    is_ready = ready.get("status") == "True"
    # The node's controller leaves the containers ready. The kubelet writes both conditions, or names a readiness gate.
    is_lost = (
        ready.get("status") == "False"
        and ready.get("reason") != "ReadinessGatesNotReady"
        and conditions.get("ContainersReady", {}).get("status") == "True"
    )
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") in _NO_NODE
    labels = metadata.get("labels") or {}
    label = str(labels.get(names.INFERENCE_SERVICE_LABEL, ""))
    prewarms, checks = label.endswith(names.PREWARM_SUFFIX), label.endswith(names.CHECK_SUFFIX)
    spec = body.get("spec") or {}
    adapters = _find_adapters(spec)
    containers = [_observe_container(c, True, adapters) for c in status.get("initContainerStatuses") or ()]
    containers += [_observe_container(c, prewarms or checks, adapters) for c in status.get("containerStatuses") or ()]
    return PodState(
        name=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        namespace=str(metadata.get("namespace", "")),
        config_hash=str((metadata.get("annotations") or {}).get(names.CONFIG_HASH_ANNOTATION, "")),
        template_label=str(labels.get(TEMPLATE_LABEL, "")),
        model_image=_find_model_image(spec),
        mounted_adapters=tuple(_find_mounted(spec)),
        ready=is_ready,
        leaving="deletionTimestamp" in metadata,
        prewarms=prewarms,
        checks=checks,
        phase=str(status.get("phase", "")),
        reason=str(status.get("reason", "")),
        message=str(status.get("message", "")),
        created_at=str(metadata.get("creationTimestamp", "")),
        scheduled_at=str(scheduled.get("lastTransitionTime", "")) if scheduled.get("status") == "True" else "",
        ready_at=str(ready.get("lastTransitionTime", "")) if is_ready else "",
        node=str(spec.get("nodeName", "")),
        lost_at=str(ready.get("lastTransitionTime", "")) if is_lost else "",
        unschedulable=str(scheduled.get("message", "Unschedulable")) if unschedulable else "",
        unschedulable_at=str(scheduled.get("lastTransitionTime") or metadata["creationTimestamp"])
        if unschedulable
        else "",
        containers=tuple(containers),
    )


def _find_model_image(spec: Object) -> str:
    images = (volume.get("image") for volume in spec.get("volumes") or () if volume["name"] == names.MODEL_VOLUME)
    return next((str(image.get("reference", "")) for image in images if image), "")


def _find_adapters(spec: Object) -> dict[str, str]:
    """Return the names of adapters by the names of the containers that fetch them."""
    commands = {str(each["name"]): list(each.get("command") or ()) for each in spec.get("initContainers") or ()}
    return {name: str(each[-1]) for name, each in commands.items() if len(each) > 1 and each[-2] == names.ADAPTER_FLAG}


def _find_mounted(spec: Object) -> Iterator[MountedAdapter]:
    volumes = {volume["name"]: volume for volume in spec.get("volumes") or ()}
    for container in spec.get("containers") or ():
        for mount in container.get("volumeMounts") or ():
            if match := _OF_ADAPTERS.fullmatch(str(mount["mountPath"])):
                volume = volumes.get(mount["name"]) or {}
                claim = (volume.get("persistentVolumeClaim") or {}).get("claimName", "")
                image = (volume.get("image") or {}).get("reference", "")
                yield MountedAdapter(match["adapter"] or "", str(mount["name"]), str(claim), str(image))


def _observe_container(body: Object, initial: bool, adapters: Mapping[str, str]) -> ContainerState:
    state = body.get("state") or {}
    waiting = state.get("waiting") or {}
    ended = state.get("terminated") or (body.get("lastState") or {}).get("terminated") or {}
    return ContainerState(
        name=str(body["name"]),
        image=str(body.get("image", "")),
        adapter=adapters.get(str(body["name"]), ""),
        initial=initial,
        ready=bool(body.get("ready")),
        running="running" in state,
        waiting_reason=str(waiting.get("reason", "")),
        waiting_message=str(waiting.get("message", "")),
        ended=bool(ended),
        restarts=int(body.get("restartCount", 0)),
        exit_code=int(ended.get("exitCode", 0)),
        ended_reason=str(ended.get("reason", "")),
        ended_message=str(ended.get("message", "")),
        started_at=str(ended.get("startedAt") or ""),
        ended_at=str(ended.get("finishedAt") or ""),
    )
