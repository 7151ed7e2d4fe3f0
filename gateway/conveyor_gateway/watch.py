"""The only calls to Kubernetes: list a collection, watch it, and list again whenever the watch ends. Reads only.

Run by `server`, one `watch_collection` per resource and namespace; what it reads goes to a sink of `catalog`. The
metrics server follows its collections the same way.
A watch that was resumed can have lost an event (a DELETED lost this way keeps requests going to a dead address), so
nothing is ever resumed: every end, also the regular one after a few minutes, leads to a new list that replaces all.
Only the configuration and the transport of the `kubernetes` package are used: its typed models cost far more memory
and start time than plain JSON.
"""

import asyncio
import json
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
from kubernetes.aio import config
from kubernetes.aio.client import ApiClient, Configuration

from conveyor_api.kubeconfig import UNREADABLE, find_kubeconfig, no_kubernetes

Json = dict[str, Any]

logger = logging.getLogger(__name__)

_PAGE_ITEMS: Final = 500
_WATCH_SECONDS: Final = (240, 360)  # at random, so that the gateways do not all list at once
_BACKOFF_SECONDS: Final = (0.25, 8.0)
_LIST_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)
# The API server sends a bookmark about once a minute: silence beyond this is a dead connection.
_SILENCE_SECONDS: Final = 100.0
_WATCH_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENCE_SECONDS)
# What nobody has heard of for longer may have changed: a list follows a dead connection within a second or so.
MAX_SILENCE_SECONDS: Final = _SILENCE_SECONDS + 10.0


@dataclass(frozen=True, slots=True)
class Collection:
    """What is watched; an empty namespace means all of them, an empty group the core API."""

    group: str
    version: str
    plural: str
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""

    @property
    def path(self) -> str:
        root = f"/apis/{self.group}" if self.group else "/api"
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"{root}/{self.version}{scope}/{self.plural}"

    @property
    def selector(self) -> dict[str, str]:
        """As query parameters."""
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {parameter: selector for parameter, selector in selectors.items() if selector}

    @property
    def name(self) -> str:
        """As logs, metrics and /readyz call it."""
        return f"{self.plural}/{self.namespace}" if self.namespace else self.plural


class Sink(Protocol):
    """Who keeps the objects."""

    def replace(self, bodies: Iterable[Json], namespace: str) -> None: ...

    def put(self, body: Json) -> object: ...

    def delete(self, body: Json) -> None: ...


@dataclass(slots=True)
class WatchState:
    """How a watch is doing. Times are those of time.monotonic()."""

    name: str
    synced: bool = False
    heard_at: float = 0.0  # last word from the API server: a list, an event or a bookmark
    lists: int = 0


class _WatchFailed(Exception):
    """The API server refused the list or the watch, or ended the watch with an error (410 among them)."""


@asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator[ApiClient]:
    """A client of the API server, by the rule of `conveyor_api.kubeconfig`. Raises SettingsError."""
    configuration = Configuration(connection_pool_maxsize=0)  # no limit: every watch keeps a connection
    path = find_kubeconfig(kubeconfig, os.environ)
    try:
        if path:
            await config.load_kube_config(path, client_configuration=configuration, persist_config=False)
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, *UNREADABLE) as error:
        raise no_kubernetes(path, error) from error
    async with ApiClient(configuration) as client:
        yield client


async def watch_collection(client: ApiClient, collection: Collection, sink: Sink, state: WatchState) -> None:
    """Keeps `sink` equal to the collection, for ever; while the API server is silent it stays as it is."""
    shortest, longest = _BACKOFF_SECONDS
    pause = shortest
    loop = asyncio.get_running_loop()
    while True:
        began = loop.time()
        try:
            await _list_then_watch(client, collection, sink, state)
            failure = None
        except (TimeoutError, OSError, aiohttp.ClientError, json.JSONDecodeError, _WatchFailed) as error:
            failure = str(error) or type(error).__name__
            logger.warning("watch=%s failed, again in at most %.1f s: %s", state.name, pause, failure)
        if loop.time() - began > longest:
            pause = shortest
        await asyncio.sleep(random.uniform(pause / 2, pause))
        pause = shortest if failure is None else min(2 * pause, longest)


async def _list_then_watch(client: ApiClient, collection: Collection, sink: Sink, state: WatchState) -> None:
    """Returns when the API server ends the watch at the time that was asked for."""
    bodies, version = await _list(client, collection.path, collection.selector)
    sink.replace(bodies, collection.namespace)
    _heard(state)
    state.lists += 1
    if not state.synced:
        state.synced = True
        logger.info("watch=%s synced objects=%d", state.name, len(bodies))
    query = {
        **collection.selector,
        "watch": "true",
        "allowWatchBookmarks": "true",
        "resourceVersion": version,
        "timeoutSeconds": str(random.randint(*_WATCH_SECONDS)),
    }
    async with _get(client, collection.path, query, _WATCH_TIMEOUT) as response:
        async for line in _read_lines(response.content):
            _take_event(json.loads(line), sink)
            _heard(state)


async def _list(client: ApiClient, path: str, selector: Mapping[str, str]) -> tuple[list[Json], str]:
    """All objects, page by page, and the version to watch from."""
    bodies: list[Json] = []
    query = {**selector, "limit": str(_PAGE_ITEMS)}
    while True:
        async with _get(client, path, query, _LIST_TIMEOUT) as response:
            page: Json = json.loads(await response.read())
        bodies += page.get("items") or []
        token = page["metadata"].get("continue")
        if not token:
            return bodies, page["metadata"]["resourceVersion"]
        query["continue"] = token


def _take_event(event: Json, sink: Sink) -> None:
    kind, body = event["type"], event["object"]
    if kind in ("ADDED", "MODIFIED"):
        sink.put(body)
    elif kind == "DELETED":
        sink.delete(body)
    elif kind != "BOOKMARK":
        raise _WatchFailed(f"{body.get('code')} {body.get('reason')}: {body.get('message')}")


async def _read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length: the reader's own `readline` refuses those above its buffer, and an object may be larger."""
    pieces: list[bytes] = []
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join((*pieces, end))
            pieces.clear()
        if rest:
            pieces.append(rest)


@asynccontextmanager
async def _get(
    client: ApiClient, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
) -> AsyncIterator[aiohttp.ClientResponse]:
    request = await client.param_serialize(
        "GET",
        path,
        query_params=list(query.items()),
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
    )
    response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=limits)).response
    async with response:
        if response.status != 200:
            text = (await response.text())[:500]
            hint = "; grant it with the chart's roles" if response.status == 403 else ""
            raise _WatchFailed(f"GET {path}: {response.status}: {text}{hint}")
        yield response


def _heard(state: WatchState) -> None:
    state.heard_at = time.monotonic()
