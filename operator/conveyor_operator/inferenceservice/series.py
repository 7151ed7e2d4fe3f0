"""Reads from an InferenceService what the operator's metrics expose of it. Pure; used by `resource`.

There are at most ten series for a service: seven for conditions, and three for replicas. `Reconciling` and `Stalled`
repeat others, so they have none.
"""

from collections.abc import Mapping
from typing import Any

from conveyor_api.conditions import ABNORMAL, ConditionType
from conveyor_operator.metrics import ServiceState


def read_state(body: Mapping[str, Any], status: Mapping[str, Any]) -> ServiceState:
    """Return the state. The spec may be invalid; the status then has what was known before.

    Leaves out conditions of other types, which a newer operator may have written.
    """
    by_type = {condition["type"]: condition for condition in status.get("conditions") or ()}
    found = [by_type[type] for type in ConditionType if type in by_type and type not in ABNORMAL]
    counts = {
        "desired": status.get("desiredReplicas"),
        "ready": status.get("readyReplicas"),
        "maximum": (body["spec"].get("autoscaling") or {}).get("maxReplicas"),
    }
    return ServiceState(
        conditions=tuple((each["type"], each["status"], each["reason"]) for each in found),
        replicas={of: count for of, count in counts.items() if isinstance(count, int)},
    )
