"""Reads the Events of a service with the caller's token, so that the caller's own rights decide."""

from collections.abc import Sequence
from typing import Final

import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import KIND
from conveyor_api.text import clip
from conveyor_console.kubernetes_api import Unanswered, call

_MAX_BYTES: Final = 2 << 20
_MAX_EVENTS: Final = 500
_MAX_SHOWN: Final = 20


class Event(msgspec.Struct, frozen=True, rename="camel"):
    """What is shown of an Event. Times are RFC 3339."""

    type: str | None = None
    reason: str | None = None
    message: str | None = None
    count: int | None = None
    last_timestamp: str | None = None
    event_time: str | None = None

    @property
    def time(self) -> str:
        return (self.last_timestamp or self.event_time or "")[:19]

    @property
    def words(self) -> str:
        return clip(f"{self.reason or ''}: {self.message or ''}", 600)


class _Events(msgspec.Struct):
    items: list[Event] | None = None


async def read_events(client: ApiClient, token: str, namespace: str, name: str) -> tuple[Sequence[Event], str]:
    """Return the newest Events of the InferenceService, and why there are none, or ""."""
    query = [("fieldSelector", f"involvedObject.kind={KIND},involvedObject.name={name}"), ("limit", str(_MAX_EVENTS))]
    path = f"/api/v1/namespaces/{namespace}/events"
    try:
        status, content = await call(client, "GET", path, _MAX_BYTES, query, token=token)
        if status == 403:
            return (), "You may not list Events in this namespace."
        if status != 200:
            return (), f"Kubernetes answers with status {status}."
        events = msgspec.json.decode(content, type=_Events).items or []
    except (Unanswered, msgspec.DecodeError):
        return (), "Kubernetes does not answer."
    shown = sorted(events, key=lambda event: event.time, reverse=True)[:_MAX_SHOWN]
    return shown, "" if shown else "There are no recent Events."
