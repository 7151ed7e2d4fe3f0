"""A list of Kubernetes objects, kept current: list, watch, and list again whenever the watch ends.

Used by `server` for the front proxy's ConfigMap and for the gateways' EndpointSlices. Works on plain JSON: the typed
client of the `kubernetes` package costs 130 MB and 3 s of start, so only its configuration and transport are used.
Knows nothing of what it watches.
"""

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NoReturn

import aiohttp
from kubernetes.aio.client import ApiClient

Json = dict[str, Any]

logger = logging.getLogger(__name__)

_WATCH_SECONDS = 120
_BACKOFF_SECONDS = (0.5, 10.0)
_LIST_TIMEOUT = aiohttp.ClientTimeout(total=15)
# A watch on a dead connection is noticed when even its regular end does not come.
_WATCH_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=_WATCH_SECONDS + 10)


class _WatchFailed(Exception):
    """The API server refused the list or ended the watch with an error."""


async def watch_objects(
    client: ApiClient, path: str, selector: Mapping[str, str], on_change: Callable[[list[Json]], None]
) -> NoReturn:
    """Calls `on_change` with all objects after the first list and after every change, for ever.

    `path` is the collection's, `selector` its query (labelSelector, fieldSelector). While the API server does not
    answer, nothing is called: what was known last stays.
    """
    pause, longest = _BACKOFF_SECONDS
    while True:
        try:
            async for objects in _list_then_watch(client, path, selector):
                on_change(objects)
                pause = _BACKOFF_SECONDS[0]
            continue
        except (TimeoutError, OSError, aiohttp.ClientError, json.JSONDecodeError, _WatchFailed) as error:
            logger.warning("watch of %s failed, again in %.1f s: %s", path, pause, error or type(error).__name__)
        await asyncio.sleep(pause * random.uniform(0.5, 1.0))
        pause = min(2 * pause, longest)


async def _list_then_watch(client: ApiClient, path: str, selector: Mapping[str, str]) -> AsyncIterator[list[Json]]:
    """Ends when the API server ends the watch in its time."""
    async with await _get(client, path, selector, _LIST_TIMEOUT) as response:
        listed: Json = await response.json()
    objects = {_identity(item): item for item in listed.get("items") or []}
    yield list(objects.values())
    follow = {
        **selector,
        "watch": "true",
        "resourceVersion": listed["metadata"]["resourceVersion"],
        "timeoutSeconds": str(_WATCH_SECONDS),
    }
    async with await _get(client, path, follow, _WATCH_TIMEOUT) as response:
        async for line in response.content:
            event: Json = json.loads(line)
            changed: Json = event["object"]
            if event["type"] == "ERROR":
                raise _WatchFailed(changed.get("message", "the watch ended with an error"))
            if event["type"] == "DELETED":
                objects.pop(_identity(changed), None)
            else:
                objects[_identity(changed)] = changed
            yield list(objects.values())


async def _get(
    client: ApiClient, path: str, query: Mapping[str, str], limits: aiohttp.ClientTimeout
) -> aiohttp.ClientResponse:
    request = await client.param_serialize(
        "GET",
        path,
        query_params=list(query.items()),
        header_params={"Accept": "application/json"},
        auth_settings=["BearerToken"],
    )
    response: aiohttp.ClientResponse = (await client.call_api(*request, _request_timeout=limits)).response
    if response.status == 200:
        return response
    async with response:
        text = (await response.text())[:500]
    hint = "; grant it with the chart's metrics roles" if response.status == 403 else ""
    raise _WatchFailed(f"{response.status}: {text}{hint}")


def _identity(item: Json) -> tuple[str, str]:
    return item["metadata"].get("namespace", ""), item["metadata"]["name"]
