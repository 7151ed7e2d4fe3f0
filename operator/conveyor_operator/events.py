"""Kubernetes Events about an InferenceService: one per transition of a condition, never one per retry.

`reconcile` calls `find_transitions` (pure) with the conditions before and after a status write, and `build_event`
for each; `cluster` writes them. Kopf's own posting is off.
"""

import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from conveyor_api import names
from conveyor_operator.conditions import IN_PROGRESS

Object = Mapping[str, Any]

_CONTROLLER = f"{names.GROUP}/operator"
_NOTE_CHARACTERS = 1024  # the API's limit
_INSTANCE = socket.gethostname()[:128]


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition that has another status or reason than before."""

    type: str
    warning: bool
    reason: str
    message: str


def find_transitions(before: Object, after: Object) -> list[Transition]:
    """What to tell, from one status to the next.

    A first condition that is not True is no news, unless somebody has to act; Unknown never is news.
    """
    old = {c["type"]: (c["status"], c["reason"]) for c in before.get("conditions") or ()}
    transitions = []
    for condition in after.get("conditions") or ():
        type, status, reason = condition["type"], condition["status"], condition["reason"]
        warning = status == "False" and reason not in IN_PROGRESS
        news = type in old or status == "True" or warning
        if old.get(type) != (status, reason) and status != "Unknown" and news:
            transitions.append(Transition(type, warning, reason, condition.get("message", "")))
    return transitions


def build_event(body: Object, transition: Transition, now: datetime) -> dict[str, Any]:
    """An Event in the namespace of the resource `body`."""
    metadata = body["metadata"]
    note = f"{transition.type}: {transition.message}"
    return {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name']}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "eventTime": now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": _CONTROLLER,
        "reportingInstance": _INSTANCE,
        "type": "Warning" if transition.warning else "Normal",
        "reason": transition.reason[:128],
        "action": "Reconcile",
        "regarding": {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "note": note if len(note) <= _NOTE_CHARACTERS else note[: _NOTE_CHARACTERS - 3] + "...",
    }
