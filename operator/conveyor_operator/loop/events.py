"""Kubernetes Events about a resource: one for each change, but none for retries or for states that last. Pure.

A resource returns `Event`s, `build_event` builds the objects, and `report` writes them. Kopf's own posting is off.
These are core/v1 Events, because `kubectl describe` sorts by `lastTimestamp`, which cannot be set in events.k8s.io/v1.
"""

import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from conveyor_api import names
from conveyor_api.text import clip

_CONTROLLER = f"{names.GROUP}/operator"
_MESSAGE_BYTES = 1024  # the API's limit
_INSTANCE = socket.gethostname()[:128]


@dataclass(frozen=True, slots=True)
class Event:
    """One occurrence, with a message for people."""

    reason: str
    message: str
    warning: bool = False


def build_event(body: Mapping[str, Any], event: Event, now: datetime) -> dict[str, Any]:
    """Return an Event object in the namespace of the resource `body`."""
    metadata, moment = body["metadata"], now.astimezone(UTC)
    seconds = moment.strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        # Names sort by time, as client-go's do, so that a list keeps the order of Events within one second.
        "metadata": {"name": f"{metadata['name']}.{time.time_ns():016x}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if event.warning else "Normal",
        "reason": event.reason[:128],
        "action": "Reconcile",
        "message": clip(event.message, _MESSAGE_BYTES),
        "eventTime": moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "firstTimestamp": seconds,
        "lastTimestamp": seconds,
        "count": 1,
        "source": {"component": _CONTROLLER},
        "reportingComponent": _CONTROLLER,
        "reportingInstance": _INSTANCE,
    }
