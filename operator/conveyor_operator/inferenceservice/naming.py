"""The served name of an InferenceService: the wanted name, and the condition `NameClaimed`. Pure.

A message never says which other namespace has the name, because the reader may not be allowed to know.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conveyor_api.conditions import Reason
from conveyor_api.names import MAX_SERVED_NAMES
from conveyor_kube.served_names import parse_time_unix
from conveyor_operator.served_names.answer import NameAnswer, NameState, RequestedName


@dataclass(frozen=True, slots=True)
class NameOf:
    """The served name of the service `namespace/name`, and the state of its claim."""

    service: str = ""
    name: str = ""
    answer: NameAnswer = field(default_factory=NameAnswer)


def find_requested_name(body: Mapping[str, Any]) -> RequestedName:
    """Return an InferenceService's wanted name, its age and readiness, even if the rest of its spec is invalid."""
    metadata, model = body["metadata"], (body.get("spec") or {}).get("model") or {}
    status = body.get("status") or {}
    is_ready = status.get("observedGeneration") == metadata.get("generation") and any(
        each.get("type") == "Ready" and each.get("status") == "True" for each in status.get("conditions") or ()
    )
    name = str(model.get("name") or metadata["name"])
    return RequestedName(name, parse_time_unix(metadata["creationTimestamp"]), is_ready)


def judge_claim(found: NameOf) -> tuple[str, Reason, str]:
    """Return status, reason and message of the condition `NameClaimed`."""
    name, key = found.name, found.service
    instead = f"at the gateway's root, clients set model to {key!r}"
    choose = f"{instead}; for a shorter name, set another model.name"
    match found.answer.state:
        case NameState.HELD:
            return "True", Reason.NAME_CLAIMED, f"at the gateway's root, clients set model to {name!r}"
        case NameState.SHARED:
            older = f"the name {name!r} belongs to the older InferenceService {found.answer.detail} of this namespace"
            return "False", Reason.NAME_TAKEN, f"{older}; {choose}"
        case NameState.TAKEN:
            return "False", Reason.NAME_TAKEN, f"the name {name!r} is already taken; {choose}"
        case NameState.TOO_MANY:
            most = f"the namespace is at its limit of {MAX_SERVED_NAMES} served names"
            remedy = "delete a ServedName that you no longer need"
            return "False", Reason.TOO_MANY_NAMES, f"{most}, so {name!r} is not claimed; {instead}; {remedy}"
        case NameState.NOT_ALLOWED:
            why = f"the name {name!r} has the form NAMESPACE/NAME of a service in another namespace"
            return "False", Reason.NAME_NOT_ALLOWED, f"{why}; {choose}"
        case NameState.PENDING:
            refusal = f": {found.answer.detail}" if found.answer.detail else ""
            return "Unknown", Reason.NAME_PENDING, f"the name {name!r} is not claimed yet{refusal}; {instead}"
