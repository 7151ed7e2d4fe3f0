"""Reads the Events of a service with the caller's token, so that the caller's own rights decide."""

from collections.abc import Sequence
from typing import Final

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import KIND
from conveyor_api.text import clip
from conveyor_http.reading import AnswerTooLong, read_answer

_TIMEOUT: Final = aiohttp.ClientTimeout(total=10)
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
    request = await client.param_serialize(
        "GET",
        f"/api/v1/namespaces/{namespace}/events",
        query_params=query,
        header_params={"Accept": "application/json", "Authorization": f"Bearer {token}"},
    )
    try:
        response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=_TIMEOUT)).response
        async with response:
            if response.status == 403:
                return (), "You may not list Events in this namespace."
            if response.status != 200:
                return (), f"Kubernetes answers with status {response.status}."
            content = await read_answer(response.content, _MAX_BYTES)
        events = msgspec.json.decode(content, type=_Events).items or []
    except (aiohttp.ClientError, TimeoutError, OSError, AnswerTooLong, msgspec.DecodeError):
        return (), "Kubernetes does not answer."
    shown = sorted(events, key=lambda event: event.time, reverse=True)[:_MAX_SHOWN]
    return shown, "" if shown else "There are no recent Events."
