"""Lists a collection, watches it, and lists it again when the watch ends. Reads only.

The gateway and the metrics server call Kubernetes only here: their `server` runs one `watch_collection` for each
resource and namespace, and each passes the objects to a sink. The operator uses this module for the objects of the
metrics API, ServedNames, the gateways' EndpointSlices and optional kinds. Kopf watches InferenceServices and their
children (docs/adr/0016), and `read_lines` reads these watches.

Every watch begins with a list that replaces all objects, and is never resumed (docs/adr/0132). It ends after an hour at
the latest. Memory is limited for objects of any content: pages are small, only an object's wanted fields are kept
(`wanted_json`), and no text is read beyond a limit.

Of the `kubernetes` package, only the configuration and the transport are used. Its typed models would cost far more
memory and start time than plain JSON.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient

from conveyor_api.names import GROUP
from conveyor_http.reading import AnswerTooLong, read_answer
from conveyor_kube.authorities import follow_authorities
from conveyor_kube.kubeconfig import load_configuration
from conveyor_kube.wanted_json import Event, Json, Named, Page, Status, decode, decode_item

logger = logging.getLogger(__name__)

_JSON: Final = "application/json"
# The API server accepts no object above 3 MiB, so a page of so many stays below 32 MiB.
_PAGE_ITEMS: Final = 10
# etcd counts all objects that follow for each page. So pages of small objects grow, or 100,000 would take minutes.
_MAX_PAGE_ITEMS: Final = 500
_SMALL_PAGE_BYTES: Final = 1 << 20
_LARGE_PAGE_BYTES: Final = 8 << 20  # a page that has grown is read up to here, then again with fewer objects
_MAX_TEXT_BYTES: Final = 64 << 20  # of a page or an event
_WATCH_SECONDS: Final = (2700, 3600)  # random, so that not all gateways list at the same time
_BACKOFF_SECONDS: Final = (0.25, 8.0)
_WARN_SECONDS: Final = 60.0  # between warnings about one watch that fails again and again
_LIST_TIMEOUT: Final = aiohttp.ClientTimeout(total=30)
# The API server sends a bookmark about once a minute. After a longer silence than this, the connection is dead.
_SILENCE_SECONDS: Final = 100.0
_WATCH_TIMEOUT: Final = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_SILENCE_SECONDS)
# A new list follows a dead connection within about a second. After a longer silence, objects may have changed unseen.
MAX_SILENCE_SECONDS: Final = _SILENCE_SECONDS + 10.0


@dataclass(frozen=True, slots=True)
class Collection:
    """A collection to watch. An empty namespace means all namespaces, an empty group the core API.

    The sink gets those fields of each object that `shape`, a TypedDict, names.
    """

    group: str
    version: str
    plural: str
    namespace: str = ""
    label_selector: str = ""
    field_selector: str = ""
    shape: Any = Named

    @property
    def path(self) -> str:
        root = f"/apis/{self.group}" if self.group else "/api"
        scope = f"/namespaces/{self.namespace}" if self.namespace else ""
        return f"{root}/{self.version}{scope}/{self.plural}"

    @property
    def selector(self) -> dict[str, str]:
        """The selectors as query parameters."""
        selectors = {"labelSelector": self.label_selector, "fieldSelector": self.field_selector}
        return {parameter: selector for parameter, selector in selectors.items() if selector}

    @property
    def name(self) -> str:
        """The name in logs, metrics and /readyz."""
        return f"{self.plural}/{self.namespace}" if self.namespace else self.plural


class Sink(Protocol):
    """Stores the objects. If an object does not have the collection's shape, the sink gets only its `metadata`."""

    def put(self, body: Json) -> str:
        """Add or replace an object. Returns its key."""
        ...

    def delete(self, body: Json) -> None: ...

    def keep_only(self, keys: set[str], namespace: str) -> Iterable[None]:
        """Remove all objects in `namespace` ("" for all namespaces) except those with these keys.

        The caller iterates over the result and may pause at each item, so that the removal of many objects can be
        divided over several turns of the event loop.
        """
        ...


@dataclass(slots=True)
class WatchState:
    """The state of a watch. Times are those of time.monotonic()."""

    name: str
    synced: bool = False
    received_at: float = 0.0  # when the API server last sent a list, an event or a bookmark


class WatchFailed(Exception):
    """The API server refused a list or a watch, ended it with an error (such as 410), or sent too long a text."""


@asynccontextmanager
async def connect(kubeconfig: str) -> AsyncIterator[ApiClient]:
    """Yield a client of the API server that `conveyor_kube.kubeconfig` finds. Raises SettingsError."""
    configuration = await load_configuration(kubeconfig)
    async with ApiClient(configuration) as client:
        following = asyncio.create_task(follow_authorities(configuration.ssl_ca_cert, client.rest_client.ssl_context))
        try:
            yield client
        finally:
            following.cancel()


async def watch_collection(
    client: ApiClient,
    collection: Collection,
    sink: Sink,
    state: WatchState,
    on_failure: Callable[[], None] = lambda: None,
) -> None:
    """Keep `sink` equal to the collection until cancelled. `on_failure` is called before the retry after a failure."""
    watch = _Watch(client, collection, sink, state)
    shortest, longest = _BACKOFF_SECONDS
    pause = shortest
    loop = asyncio.get_running_loop()
    warned_at = -_WARN_SECONDS
    while True:
        began = loop.time()
        failure = None
        try:
            await watch.follow()
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError, WatchFailed) as error:
            failure = str(error) or type(error).__name__
        if loop.time() - began > longest:
            pause = shortest
        if failure is not None:
            on_failure()
            # A watch that fails from time to time is normal. One that fails repeatedly needs attention.
            level = logging.INFO if pause == shortest else logging.WARNING
            if level == logging.INFO or loop.time() - warned_at >= _WARN_SECONDS:
                logger.log(level, "event=watch_failed watch=%s retry_seconds=%.1f error=%s", state.name, pause, failure)
                warned_at = loop.time() if level == logging.WARNING else warned_at
        await asyncio.sleep(random.uniform(pause / 2, pause))
        pause = min(2 * pause, longest)


class _Watch:
    """The watch of one collection."""

    def __init__(self, client: ApiClient, collection: Collection, sink: Sink, state: WatchState) -> None:
        self._client = client
        self._collection = collection
        self._sink = sink
        self._state = state

    async def follow(self) -> None:
        """List, then watch. Returns when the API server ends the watch."""
        version = await self._list()
        query = {
            **self._collection.selector,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(random.randint(*_WATCH_SECONDS)),
        }
        async with open_page(self._client, self._collection.path, query, _WATCH_TIMEOUT) as response:
            async for line in read_lines(response.content):
                self._take_event(await decode(line, Event))
                self._note_answer()
                await asyncio.sleep(0)  # one read may have many events

    async def _list(self) -> str:
        """List the collection into the sink. Returns the resource version to watch from."""
        keys: set[str] = set()  # not the objects, because there may be many large ones
        limit, largest = _PAGE_ITEMS, _MAX_PAGE_ITEMS
        query = dict(self._collection.selector)
        while True:
            query["limit"] = str(limit)
            try:
                async with open_page(self._client, self._collection.path, query, _LIST_TIMEOUT) as response:
                    max_bytes = _MAX_TEXT_BYTES if limit == _PAGE_ITEMS else _LARGE_PAGE_BYTES
                    text = await read_answer(response.content, max_bytes)
            except AnswerTooLong as error:
                if limit == _PAGE_ITEMS:
                    raise _too_long() from error
                limit = largest = _PAGE_ITEMS
                continue
            page = await decode(text, Page)
            self._note_answer()
            limit = min(2 * limit, largest) if len(text) <= _SMALL_PAGE_BYTES else _PAGE_ITEMS
            for item in page.items or ():
                keys.add(self._sink.put(decode_item(item, self._collection.shape)))
                await asyncio.sleep(0)  # lets the event loop serve other requests
            if not page.metadata.more:
                break
            query["continue"] = page.metadata.more
        for _ in self._sink.keep_only(keys, self._collection.namespace):
            await asyncio.sleep(0)
        if not self._state.synced:
            self._state.synced = True
            logger.info("event=watch_synced watch=%s objects=%d", self._state.name, len(keys))
        return page.metadata.resource_version

    def _take_event(self, event: Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=Status)
            raise WatchFailed(f"{status.code} {status.reason}: {status.message}")
        if event.type != "BOOKMARK":
            body = decode_item(event.object, self._collection.shape)
            (self._sink.delete if event.type == "DELETED" else self._sink.put)(body)

    def _note_answer(self) -> None:
        self._state.received_at = time.monotonic()


async def read_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytearray]:
    """Yield lines up to the size limit. Raises WatchFailed for longer ones.

    The reader's own `readline` is not used, because it refuses lines above its buffer size, which objects exceed.
    """
    line = bytearray()
    async for chunk in content.iter_any():
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line += end
            _check_size(line)
            yield line
            line = bytearray()
        line += rest
        _check_size(line)


def _check_size(text: bytearray) -> None:
    if len(text) > _MAX_TEXT_BYTES:
        raise _too_long()


def _too_long() -> WatchFailed:
    return WatchFailed(f"the API server sent a text of more than {_MAX_TEXT_BYTES} bytes")


@asynccontextmanager
async def open_page(
    client: ApiClient, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout, accept: str = _JSON
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yield the response to a GET of one of the API server's pages. Raises WatchFailed for a status other than 200."""
    request = await client.param_serialize(
        "GET",
        path,
        query_params=list(query.items()),
        header_params={"Accept": accept},
        auth_settings=["BearerToken"],
    )
    response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=limits)).response
    async with response:
        if response.status == 404:
            hint = "; install its CRD, which is a part of the chart" if path.startswith(f"/apis/{GROUP}/") else ""
            raise WatchFailed(f"the API server does not serve {path}{hint}")
        if response.status != 200:
            text = (await response.text())[:500]
            hint = "; grant it with the chart's roles" if response.status == 403 else ""
            raise WatchFailed(f"GET {path}: {response.status}: {text}{hint}")
        yield response
