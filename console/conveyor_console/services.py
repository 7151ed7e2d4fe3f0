"""Keeps the part of each InferenceService that the pages show. A sink of `conveyor_kube.watch`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NotRequired, TypedDict

from conveyor_api.conditions import ConditionType
from conveyor_api.names import GROUP, PLURAL, VERSION
from conveyor_api.quantities import parse_duration_seconds
from conveyor_api.text import clip
from conveyor_kube.unreadable import Unreadable
from conveyor_kube.wanted_json import Identity, Json, find_key, keys_within
from conveyor_kube.watch import Collection

_MAX_TEXT_BYTES: Final = 600  # of a message on a page


class _Metadata(Identity):
    generation: NotRequired[int]


class _Objectives(TypedDict):
    timeToFirstToken: NotRequired[str | None]
    latency: NotRequired[str | None]
    interTokenLatency: NotRequired[str | None]


class _Batching(TypedDict):
    objectives: NotRequired[_Objectives | None]


class _Spec(TypedDict):
    task: NotRequired[str | None]
    batching: NotRequired[_Batching | None]


class _Condition(TypedDict):
    type: str
    status: str
    reason: str
    message: NotRequired[str]


class _Autoscaling(TypedDict):
    reason: NotRequired[str | None]
    message: NotRequired[str | None]


class _Effective(TypedDict):
    mode: NotRequired[str | None]


class _Model(TypedDict):
    name: NotRequired[str | None]
    task: NotRequired[str | None]


class _LastStart(TypedDict):
    total: NotRequired[str | None]
    schedule: NotRequired[str | None]
    image: NotRequired[str | None]
    model: NotRequired[str | None]
    load: NotRequired[str | None]
    warmUp: NotRequired[str | None]


class _LastFailure(TypedDict):
    reason: NotRequired[str | None]
    message: NotRequired[str | None]
    time: NotRequired[str | None]


class _Status(TypedDict):
    observedGeneration: NotRequired[int | None]
    conditions: NotRequired[list[_Condition] | None]
    readyReplicas: NotRequired[int | None]
    updatedReplicas: NotRequired[int | None]
    lastStart: NotRequired[_LastStart | None]
    lastFailure: NotRequired[_LastFailure | None]
    desiredReplicas: NotRequired[int | None]
    autoscaling: NotRequired[_Autoscaling | None]
    effective: NotRequired[_Effective | None]
    model: NotRequired[_Model | None]
    url: NotRequired[str | None]


class ShownBody(TypedDict):
    """An InferenceService."""

    metadata: _Metadata
    spec: _Spec
    status: NotRequired[_Status | None]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition of the service. `status`: True, False or Unknown."""

    status: str
    reason: str
    message: str


_STARTS: Final = {
    "total": "in all",
    "schedule": "to find a node",
    "image": "to pull the image and mount volumes",
    "model": "to download or find the model",
    "load": "to load it",
    "warmUp": "of it to warm up",
}
_NOT_SEEN: Final = Condition("Unknown", "NotReconciled", "the operator has not reconciled this service yet")


@dataclass(frozen=True, slots=True)
class Service:
    """One InferenceService. Objectives are seconds, None without an objective."""

    namespace: str
    name: str
    ready: Condition = _NOT_SEEN
    progressing: bool = False
    model: str = ""
    task: str = ""
    mode: str = ""
    ready_replicas: int = 0
    desired_replicas: int = 0
    scaling_reason: str = ""
    scaling: str = ""
    """The autoscaler's last decision with its arithmetic."""
    first_token_objective: float | None = None
    """Of tasks that take one step: the objective of the result."""
    between_tokens_objective: float | None = None
    updated_replicas: int = 0
    """Pods of the current spec."""
    conditions: tuple[tuple[str, Condition], ...] = ()
    """By type, in the operator's order."""
    last_start: tuple[tuple[str, str], ...] = ()
    """The parts of the last start of an engine, as (part, duration), the total first."""
    last_failure: str = ""
    url: str = ""
    """Of the service at the gateways."""

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


def shown_collection(namespace: str) -> Collection:
    """Return the collection of InferenceServices in a namespace; "" for all namespaces."""
    return Collection(GROUP, VERSION, PLURAL, namespace, shape=ShownBody)


class Services:
    """All services by `namespace/name`."""

    def __init__(self) -> None:
        self.by_key: dict[str, Service] = {}
        self._unreadable = Unreadable("service", "its last readable state is shown")

    def put(self, body: Json) -> str:
        key = find_key(body)
        service = self._unreadable.parse(key, parse_service, body)
        if service is not None:
            self.by_key[key] = service
        return key

    def delete(self, body: Json) -> None:
        key = find_key(body)
        self._unreadable.forget(key)
        self.by_key.pop(key, None)

    def keep_only(self, keys: set[str], namespace: str) -> Iterator[None]:
        self._unreadable.forget_others(keys, namespace)
        for key in keys_within(namespace, self.by_key) - keys:
            del self.by_key[key]
            yield


def parse_service(body: Json) -> Service:
    """Return what is shown of an InferenceService. Raises LookupError, TypeError or ValueError."""
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    is_current = status.get("observedGeneration") == metadata.get("generation")
    scaling, model = status.get("autoscaling") or {}, status.get("model") or {}
    start, failure = status.get("lastStart") or {}, status.get("lastFailure") or {}
    objectives = (spec.get("batching") or {}).get("objectives") or {}
    return Service(
        namespace=metadata["namespace"],
        name=metadata["name"],
        ready=_find_ready(conditions),
        progressing=not is_current or _is_true(conditions.get(ConditionType.PROGRESSING)),
        model=clip(model.get("name") or "", 128),
        task=clip(spec.get("task") or model.get("task") or "", 64),
        mode=clip((status.get("effective") or {}).get("mode") or "", 64),
        ready_replicas=status.get("readyReplicas") or 0,
        desired_replicas=status.get("desiredReplicas") or 0,
        scaling_reason=scaling.get("reason") or "",
        scaling=clip(scaling.get("message") or "", _MAX_TEXT_BYTES),
        first_token_objective=_parse_objective(objectives.get("timeToFirstToken") or objectives.get("latency")),
        between_tokens_objective=_parse_objective(objectives.get("interTokenLatency")),
        updated_replicas=status.get("updatedReplicas") or 0,
        conditions=tuple((clip(kind, 64), _build_condition(each)) for kind, each in conditions.items()),
        last_start=tuple((word, clip(start[part], 32)) for part, word in _STARTS.items() if start.get(part)),
        last_failure=clip(" ".join(failure[part] for part in ("time", "reason", "message") if failure.get(part)), 900),
        url=clip(status.get("url") or "", 1024),
    )


def _find_ready(conditions: Mapping[str, Any]) -> Condition:
    ready = conditions.get(ConditionType.READY)
    return _NOT_SEEN if ready is None else _build_condition(ready)


def _build_condition(body: Mapping[str, Any]) -> Condition:
    return Condition(body["status"], clip(body["reason"], 64), clip(body.get("message") or "", _MAX_TEXT_BYTES))


def _is_true(condition: Mapping[str, Any] | None) -> bool:
    return condition is not None and condition["status"] == "True"


def _parse_objective(text: str | None) -> float | None:
    return None if text is None else parse_duration_seconds(text)
