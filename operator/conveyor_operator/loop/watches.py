"""Reads the watches that Kopf opens, line by line. Stores each object's projection, and passes only metadata to Kopf.

`session` puts this between the API server and Kopf. Tenants write objects, so each object is parsed separately: an
invalid one is counted, logged and skipped. Only an object's projection is kept. The initial list of a watch also shows
which objects no longer exist, so Kopf receives deletions that no watch has seen.

Every watch begins with such a list and is never resumed (docs/adr/0132).
"""

import asyncio
import json
import logging
import random
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

import aiohttp

from conveyor_kube.watch import WatchFailed, read_lines
from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop.resource import Resource
from conveyor_operator.loop.store import Store
from conveyor_operator.metrics import Metrics

logger = logging.getLogger(__name__)

UNREADABLE = (LookupError, TypeError, ValueError, AttributeError, RecursionError)

_SILENT_SECONDS = 65.0
"""If Kopf cancels a watch that sent no line for at least this long, the silence is logged.

The API server sends a bookmark every minute. Kopf cancels a watch after 70 seconds without a line.
"""
WATCH_SECONDS_MAX = 3600
"""After this time the API server ends a watch, and the next one begins with a new list."""
_WATCH_SECONDS = (0.75 * WATCH_SECONDS_MAX, WATCH_SECONDS_MAX)
"""After a random time between these, the watch ends at its next line, so that the kinds are not listed together."""
_START_ANEW = {"type": "ERROR", "object": {"code": 410}}
_PASSED_TO_KOPF = ("name", "namespace", "uid", "generation", "resourceVersion", "deletionTimestamp")
_NAME = re.compile(rb'"name":"([a-z0-9.-]{1,253})","namespace":"([a-z0-9-]{1,63})"')

Object = Mapping[str, Any]


class Mark(Protocol):
    """Queues a reconcile of a resource."""

    def __call__(self, key: Key, *, urgent: bool = True) -> None: ...


class Watches:
    """Calls `mark` with a resource's key when an object's label no longer names that resource.

    It also calls `mark` for each new or changed child and grandchild in the initial list of a watch. Kopf does not get
    them, because it creates a task and a record for each object. With thousands of objects, a start would take minutes.
    """

    def __init__(self, resources: Sequence[Resource], store: Store, metrics: Metrics, mark: Mark) -> None:
        self._resources = {resource.kind: resource for resource in resources}
        self._store = store
        self._metrics = metrics
        self._mark = mark
        self._listed: defaultdict[tuple[ObjectKind, str | None], asyncio.Event] = defaultdict(asyncio.Event)

    async def wait_listed(self, kind: ObjectKind, namespaces: Sequence[str]) -> None:
        """Wait until the store has all objects of a kind in these namespaces; if none are given, in all namespaces."""
        for namespace in namespaces or (None,):
            await self._listed[kind, namespace].wait()

    async def read(
        self, kind: ObjectKind, namespace: str | None, content: aiohttp.StreamReader, from_the_start: bool
    ) -> AsyncIterator[bytes]:
        """Yield lines for Kopf. `from_the_start`: the stream begins with all objects, followed by a bookmark.

        Whenever the stream ends, Kopf gets an error that makes it list again. If Kopf has cancelled a watch and resumes
        it, Kopf gets only this error. A resumed watch may stay silent: after a restore of etcd, its version lies ahead.
        """
        if not from_the_start:
            yield _to_line(_START_ANEW)
            return
        loop = asyncio.get_running_loop()
        seen: set[str] | None = set()
        last_line_at = loop.time()
        ends_at = last_line_at + random.uniform(*_WATCH_SECONDS)
        try:
            async for line in read_lines(content):
                last_line_at = loop.time()
                event = self._read_event(kind, line, listed=seen is not None)
                if event is None:
                    continue
                if event["type"] == "ERROR":
                    logger.info("event=watch_ended kind=%s error=%.500r", kind.kind, event["object"])
                    break
                if seen is not None and event["type"] == "BOOKMARK":
                    for gone in self._find_deleted(kind, namespace, seen):
                        yield _to_line(gone)
                    self._listed[kind, namespace].set()
                    seen = None
                elif seen is not None:
                    seen.add(event["object"]["metadata"]["uid"])
                    if kind not in self._resources:
                        continue
                yield _to_line(event)
                if seen is None and last_line_at >= ends_at:
                    break
        except asyncio.CancelledError:
            if (seconds := loop.time() - last_line_at) >= _SILENT_SECONDS:
                logger.warning("event=watch_silent kind=%s seconds=%.0f consequence=starts_anew", kind.kind, seconds)
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            logger.info("event=watch_ended kind=%s error=%r", kind.kind, error)
        except WatchFailed as error:
            logger.warning("event=watch_ended kind=%s error=%s", kind.kind, error)
        yield _to_line(_START_ANEW)

    def _read_event(self, kind: ObjectKind, line: bytearray, *, listed: bool) -> Object | None:
        """Store the event's object. Return the event for Kopf; None if the event is invalid.

        listed: the event belongs to the initial list of a watch.
        """
        try:
            event = json.loads(line)
            type, body = event["type"], event["object"]
            if type == "ERROR":
                return {"type": type, "object": body}
            metadata = {key: body["metadata"][key] for key in _PASSED_TO_KOPF if key in body["metadata"]}
            if type == "BOOKMARK":
                metadata["annotations"] = body["metadata"].get("annotations") or {}
            else:
                key = self._remember(kind, type, {**body, "kind": kind.kind}, listed=listed)
                if key is None:
                    return None
                metadata["labels"] = self._labels(kind, key)
        except UNREADABLE as error:
            who = _NAME.search(line)
            self._skip(kind, b"/".join(reversed(who.groups())).decode() if who else "unknown", error)
            return None
        return {"type": type, "object": {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}}

    def take(self, kind: ObjectKind, type: str, body: Object) -> None:
        """Store an object from a watch other than Kopf's, and queue a reconcile of its resource."""
        try:
            key = self._remember(kind, type, {**body, "kind": kind.kind})
        except UNREADABLE as error:
            self._skip(kind, f"{body['metadata'].get('namespace')}/{body['metadata']['name']}", error)
        else:
            if key is not None:
                self._mark(key)

    def keep_only(self, kind: ObjectKind, namespace: str | None, uids: set[str]) -> None:
        """Remove all objects except these from the store, after the list of a watch other than Kopf's."""
        for _, key in self._drop_others(kind, namespace, uids):
            self._mark(key)

    def _skip(self, kind: ObjectKind, name: str, error: Exception) -> None:
        self._metrics.unreadable_objects.labels(kind.plural).inc()
        logger.warning("event=object_unreadable kind=%s key=%s error=%.200r", kind.kind, name, error)

    def _remember(self, kind: ObjectKind, type: str, body: Object, *, listed: bool = False) -> Key | None:
        """Store or remove the object. Return the key of its resource; None if it belongs to none."""
        uid, key = str(body["metadata"]["uid"]), self._find_key(kind, body)
        if key is None or type == "DELETED":
            left = self._store.drop(kind, uid)
        else:
            value = self._resources[key.kind].project(kind, key, body)
            is_news = not self._store.has(kind, uid, key, value)
            left = self._store.put(kind, uid, key, value)
            if kind == key.kind:
                self._store.bodies.put(key, body, listed=listed)
            elif listed and is_news:
                self._mark(key, urgent=False)
        if left not in (None, key):  # its label was changed; the event names only the new owner
            self._mark(left)
        return key

    def _find_key(self, kind: ObjectKind, body: Object) -> Key | None:
        """Return a resource's own key, or the key of the resource that an object's label names; None without label."""
        metadata = body["metadata"]
        if kind in self._resources:
            return Key(kind, str(metadata["namespace"]), str(metadata["name"]))
        labels = metadata.get("labels") or {}
        for resource in self._resources.values():
            if kind in (*resource.children, *resource.grandchildren) and resource.label in labels:
                name = str(labels[resource.label]).partition(".")[0]  # without a suffix such as `.prewarm`
                return Key(resource.kind, str(metadata["namespace"]), name)
        return None

    def _labels(self, kind: ObjectKind, key: Key) -> dict[str, str]:
        """Return the labels by which Kopf chooses handlers."""
        return {} if kind == key.kind else {self._resources[key.kind].label: key.name}

    def _find_deleted(self, kind: ObjectKind, namespace: str | None, seen: set[str]) -> list[Object]:
        """Remove from the store the objects that the watch's list did not contain. Return a DELETED event for each."""
        events: list[Object] = []
        for uid, key in self._drop_others(kind, namespace, seen):
            labels = self._labels(kind, key)
            metadata = {"uid": uid, "namespace": key.namespace, "name": key.name, "labels": labels}
            events.append({"type": "DELETED", "object": {"kind": kind.kind, "metadata": metadata}})
        return events

    def _drop_others(self, kind: ObjectKind, namespace: str | None, uids: set[str]) -> list[tuple[str, Key]]:
        others = [(uid, key) for uid, key in self._store.keys(kind, namespace).items() if uid not in uids]
        for uid, key in others:
            logger.info("event=missed_deletion kind=%s key=%s", kind.kind, key)
            self._store.drop(kind, uid)
        return others


def _to_line(event: Object) -> bytes:
    return json.dumps(event).encode() + b"\n"
