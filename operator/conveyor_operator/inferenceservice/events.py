"""Finds the events of an InferenceService: changes from one status to the next, and edits of its children. Pure.

`loop.report` creates Kubernetes Events from the results.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from conveyor_api.conditions import ConditionType, Reason
from conveyor_operator.inferenceservice.conditions import IN_PROGRESS
from conveyor_operator.inferenceservice.scaling import SCALED
from conveyor_operator.loop.events import Event

Object = Mapping[str, Any]

# The conditions whose changes are reported. The others are causes or effects of these.
_REPORTED = (ConditionType.READY, ConditionType.PROGRESSING, ConditionType.SCALING_READY, ConditionType.NAME_CLAIMED)

# For each kind of child: the field of the spec to change, instead of editing the child.
_FIELDS = {
    "HorizontalPodAutoscaler": "spec.autoscaling",
    "PersistentVolumeClaim": "spec.model.cache",
    "Job": "spec.model",
    "ConfigMap": "spec.engine, spec.batching or spec.kvCache",
}


def find_events(before: Object, after: Object) -> list[Event]:
    """Return the events between two statuses. A cause is reported once, even if it changed several conditions."""
    found: dict[str, Event] = {}
    for event in (*_find_scaling(before, after), *_find_turned(before, after)):
        found.setdefault(event.reason, event)
    return list(found.values())


def _find_scaling(before: Object, after: Object) -> Iterator[Event]:
    old, new = before.get("autoscaling") or {}, after.get("autoscaling") or {}
    was, is_now, message = old.get("desiredReplicas"), new.get("desiredReplicas"), str(new.get("message", ""))
    if is_now and was != is_now and (was or message.startswith(SCALED)):
        yield Event("Scaled", message)


def _find_turned(before: Object, after: Object) -> Iterator[Event]:
    """Yield events for changed conditions.

    A new condition that is not True causes an event only if it needs action. Unknown never causes one.
    """
    old = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    known = {old[type][1] for type in _REPORTED if type in old}
    for condition in after.get("conditions") or ():
        type, status, reason = condition["type"], condition["status"], condition["reason"]
        was = old.get(type)
        if type not in _REPORTED or status == "Unknown" or was == (status, reason):
            continue
        warning = _is_warning(type, status, reason)
        stopped = type == ConditionType.READY and was is not None and was[0] != status
        if warning and reason in known and not stopped:
            continue  # reported already, when a condition first had this reason
        if warning or _is_good_news(type, status, reason, was):
            yield Event(reason, str(condition.get("message", "")), warning)


def _is_warning(type: str, status: str, reason: str) -> bool:
    """Return whether the event is a warning.

    With status True, `Ready` causes a warning if its reason reports failing engines or badly used resources.
    """
    partly = type == ConditionType.READY and reason != Reason.READY
    return (status == "False" or partly) and reason not in IN_PROGRESS


def _is_good_news(type: str, status: str, reason: str, was: tuple[str, str] | None) -> bool:
    if type == ConditionType.PROGRESSING:  # Ready reports the first pods
        return reason == Reason.ROLLING_OUT or (was is not None and was[1] == Reason.ROLLING_OUT)
    if type in (ConditionType.SCALING_READY, ConditionType.NAME_CLAIMED):
        return was is not None and was[0] == "False"
    if status == "True":  # an incident is over when all engines are back
        return reason != Reason.PODS_STARTING
    if was is None:
        return False
    return was[0] == "True" or reason not in (Reason.PODS_STARTING, Reason.NO_READY_ENDPOINTS)


def restored(kind: str, name: str, deleted: bool) -> Event:
    """Return the Event for a child that was edited or deleted and has been restored."""
    done = "deleted" if deleted else "edited"
    field = _FIELDS.get(kind, "the spec")
    return Event(
        "Restored",
        f"someone {done} {kind} {name}, and Conveyor restored it; change {field} of the InferenceService instead",
    )
