"""Builds the status of an InferenceService from its situation. Pure; used by `case`.

`lastTransitionTime` changes only with a condition's status.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from conveyor_api import names
from conveyor_api.adapters import Adapter
from conveyor_api.conditions import ConditionType, Reason
from conveyor_api.resource import InferenceService
from conveyor_api.status import (
    MAX_LISTED_ADAPTERS,
    AdapterStatus,
    Condition,
    EffectiveStatus,
    InferenceServiceStatus,
    LastFailure,
    LastStart,
    ModelStatus,
)
from conveyor_api.text import clip
from conveyor_operator.activity.adapter_states import Counts
from conveyor_operator.inferenceservice.conditions import Judged, judge_all
from conveyor_operator.inferenceservice.derived import describe_derived
from conveyor_operator.inferenceservice.failures import PodFailure, find_last_failure
from conveyor_operator.inferenceservice.pods import ModelFacts, find_facts
from conveyor_operator.inferenceservice.scaling import build_scaling_status, keep_decision
from conveyor_operator.inferenceservice.situation import Situation
from conveyor_operator.inferenceservice.starting import describe_places
from conveyor_operator.inferenceservice.starts import PodStart
from conveyor_operator.inferenceservice.wording import to_field_names
from conveyor_protocol.pages import AdapterCounts

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Written:
    """Values for the status that the situation does not have."""

    url: str
    effective: EffectiveStatus
    children_hash: str = ""
    last_start: PodStart | None = None
    starting_replicas: int = 0
    starting_until: datetime | None = None
    adapters: Counts | None = None


def build_status(
    service: InferenceService, situation: Situation, written: Written, previous: Object, now: datetime
) -> dict[str, Any]:
    """Return the whole status. `previous`: the current status, from which times and known facts are kept."""
    deployment, generation = situation.deployment, service.metadata.generation
    model = _build_model(service, situation, previous)
    derived = describe_derived(service.settled_spec, model.context_length) or None
    adapters = _build_adapters(service, written.adapters or {}, deployment.ready_replicas)
    status = InferenceServiceStatus(
        observed_generation=generation,
        conditions=date_conditions(judge_all(situation), previous, generation, now),
        replicas=deployment.replicas,
        ready_replicas=deployment.ready_replicas,
        starting_replicas=written.starting_replicas,
        starting_until=_find_lapse(written),
        updated_replicas=0 if situation.rolled_back or situation.keeps_template else deployment.updated_replicas,
        desired_replicas=deployment.requested_replicas,
        selector=names.pod_selector_string(service.name),
        url=written.url,
        effective=written.effective.model_copy(update={"derived": derived}),
        tried_template=situation.ready_template or None,
        children_hash=written.children_hash or None,
        model=model,
        adapters=_choose_listed(adapters),
        ready_adapters=sum(each.state == "Ready" for each in adapters) if adapters else None,
        autoscaling=build_scaling_status(
            situation.spec,
            situation.observed,
            previous.get("autoscaling") or {},
            situation.activity,
            _describe_places(service, situation, written.starting_replicas),
        ),
    )
    result = status.to_manifest()
    if "autoscaling" in result:
        result["autoscaling"] = keep_decision(previous.get("autoscaling") or {}, result["autoscaling"])
    if start := _build_last_start(written.last_start, previous):
        result["lastStart"] = start
    failure = _build_last_failure(
        find_last_failure((*situation.observed.pods, *situation.observed.prewarm_pods, *situation.observed.check_pods)),
        previous,
        now,
    )
    return result | {"lastFailure": failure} if failure else result


def _build_adapters(service: InferenceService, counts: Counts, ready_replicas: int) -> list[AdapterStatus]:
    return [_build_adapter(each, counts.get(each.name, {}), ready_replicas) for each in service.spec.adapters]


def _choose_listed(adapters: list[AdapterStatus]) -> list[AdapterStatus]:
    """Return the adapters that the status lists, in the spec's order: of many, Failed ones before others."""
    if len(adapters) <= MAX_LISTED_ADAPTERS:
        return adapters
    first = sorted(adapters, key=lambda each: ("Failed", "Loading", "Ready").index(each.state))[:MAX_LISTED_ADAPTERS]
    names = {each.name for each in first}
    return [each for each in adapters if each.name in names]


def _build_adapter(adapter: Adapter, counts: Mapping[str, AdapterCounts], ready_replicas: int) -> AdapterStatus:
    """Return the state of an adapter. counts: by directory, also of adapters that had its name before."""
    own = counts.get(adapter.directory, AdapterCounts())
    is_ready = own.ready >= ready_replicas > 0
    return AdapterStatus(
        name=adapter.name,
        state="Failed" if own.failed else "Ready" if is_ready else "Loading",
        replicas=sum(each.serving for each in counts.values()),
        message=clip(" ".join(to_field_names(own.message).split())) if own.failed else None,
    )


def _find_lapse(written: Written) -> str | None:
    return format_time(written.starting_until) if written.starting_replicas and written.starting_until else None


def _describe_places(service: InferenceService, situation: Situation, starting: int) -> str:
    """Return how many requests the metrics leave out for starting engines, as words; "" without such engines."""
    autoscaler = situation.observed.autoscaler
    if autoscaler is None:
        return ""
    counted = min(starting, autoscaler.current_replicas - situation.deployment.ready_replicas)
    return describe_places(counted, service.batching.effective_batch_size) if counted > 0 else ""


def build_invalid_status(message: str, generation: int, previous: Object, now: datetime) -> dict[str, Any]:
    """Return the status for an invalid spec. The other fields are kept, because they describe what still runs."""
    sentence = f"{message}. Conveyor changes nothing until the spec is valid; running engines keep running."
    statuses = {ConditionType.READY: "False", ConditionType.PROGRESSING: "False", ConditionType.STALLED: "True"}
    judged = [Judged(type, status, Reason.INVALID_SPEC, sentence) for type, status in statuses.items()]
    dated = [c.to_manifest() for c in date_conditions(judged, previous, generation, now)]
    said = {*statuses, ConditionType.RECONCILING}
    kept = [c for c in previous.get("conditions") or () if c["type"] not in said]
    return {**previous, "observedGeneration": generation, "conditions": [*dated, *kept]}


def date_conditions(judged: Sequence[Judged], previous: Object, generation: int, now: datetime) -> list[Condition]:
    """Add observedGeneration and lastTransitionTime, which stays the same while the status does."""
    before = {c["type"]: c for c in previous.get("conditions") or ()}
    dated = []
    for part in judged:
        old = before.get(part.type, {})
        same = old.get("status") == part.status and old.get("lastTransitionTime")
        dated.append(
            Condition(
                type=str(part.type),
                status=part.status,  # type: ignore[arg-type]
                reason=str(part.reason),
                message=clip(part.message),
                observed_generation=generation,
                last_transition_time=old["lastTransitionTime"] if same else format_time(now),
            )
        )
    return dated


def format_time(moment: datetime) -> str:
    """Return a time in RFC 3339, in UTC and whole seconds, like metav1.Time."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _build_last_start(found: PodStart | None, previous: Object) -> dict[str, Any]:
    """Return the measured start, or the previous status's."""
    if found is None:
        return dict(previous.get("lastStart") or {})
    parts = {part: f"{seconds}s" for part, seconds in found.seconds.items()}
    return LastStart(pod_name=found.pod, **parts).to_manifest()


def _build_last_failure(found: PodFailure | None, previous: Object, now: datetime) -> dict[str, Any]:
    """Return the failure that was found, or the previous one.

    A failure without a time gets the time when it was first found.
    """
    old = dict(previous.get("lastFailure") or {})
    if found is None:
        return old
    if found.since and old.get("time", "") > found.since:
        return old  # the previous failure is later, but its pod no longer exists
    same = (old.get("podName"), old.get("reason")) == (found.pod, found.reason)
    time = found.since or (old.get("time") if same else None) or format_time(now)
    failure = LastFailure(
        reason=str(found.reason), message=found.message, pod_name=found.pod, exit_code=found.exit_code, time=time
    )
    return failure.to_manifest()


def _build_model(service: InferenceService, situation: Situation, previous: Object) -> ModelStatus:
    """Return what is known of the model. Facts from its files are kept while the model's address is the same."""
    uri, found = service.spec.model.uri, find_facts(situation.pods)
    old = previous.get("model") or {}
    if found == ModelFacts() and old.get("uri") == uri:
        found = ModelFacts(*(old.get(name) for name in ("contextLength", "task", "quantization", "weightBytes")))
    return ModelStatus(
        name=service.served_model_name,
        uri=uri,
        context_length=found.context_length,
        task=service.spec.task or found.task,
        quantization=found.quantization,
        weight_bytes=found.weight_bytes,
    )
