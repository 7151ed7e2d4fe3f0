"""The handlers that Kopf calls. They only mark the key of a changed object as dirty.

`process` calls `build_registry` once. There are no change handlers, timers or daemons, because these would write
annotations and finalizers onto the resource (docs/adr/0003). `watches` has already stored the object when Kopf gets an
event.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import kopf

from conveyor_api import names
from conveyor_operator.kinds import Key, ObjectKind
from conveyor_operator.loop.resource import Resource, watched_kinds
from conveyor_operator.loop.session import KopfSession
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.watches import WATCH_SECONDS_MAX
from conveyor_operator.loop.workers import Workers

_Handler = Callable[..., Awaitable[None]]


def build_registry(
    resources: Sequence[Resource],
    store: Store,
    workers: Workers,
    session: KopfSession,
    end: Callable[[], Awaitable[None]],
) -> kopf.OperatorRegistry:
    """Return the registry with all handlers of the operator. Kopf awaits `end` when it stops."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(session.login)
    kopf.on.cleanup(registry=registry)(_build_cleanup(end))
    for resource in resources:
        _register(registry, resource.kind, build_resource_handler(resource.kind, store, workers))
    for kind, owners in _find_owners(resources).items():
        _register(registry, kind, _build_owner_handler(owners, workers))
    return registry


def configure(settings: kopf.OperatorSettings, resources: Sequence[Resource]) -> None:
    """Set up Kopf for watching only: no peering, scanning or posting. The API server filters children by label."""
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.initial_streaming = True
    settings.watching.server_timeout = WATCH_SECONDS_MAX
    settings.watching.reconnect_backoff = 1.0  # every new watch begins with a list
    settings.networking.request_timeout = 30
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = 20
    for kind, owners in _find_owners(resources).items():
        # A selector has no "or". If several resources own a kind, `watches` finds each object's owner.
        selector = owners[0].label if len(owners) == 1 else f"{names.MANAGED_BY_LABEL}=conveyor"
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = selector


def build_resource_handler(kind: ObjectKind, store: Store, workers: Workers) -> _Handler:
    """Return the event handler for a kind of resource. Called by `build_registry`, and by a test."""

    async def mark(**event: Any) -> None:
        key = Key(kind, event["namespace"], event["name"])
        if event["type"] == "DELETED" and store.uid(key) is None:
            workers.cancel(key)
            return
        # If a new object already has the name, a deletion has come late: Kopf orders only the events of one uid.
        urgent = event["type"] is not None  # None: the object existed when the watch began
        workers.mark(key, generation=int(event["meta"].get("generation", 0)), urgent=urgent)

    return mark


def _build_owner_handler(owners: Sequence[Resource], workers: Workers) -> _Handler:
    async def mark(**event: Any) -> None:
        for owner in owners:
            if owner.label in event["labels"]:
                key = Key(owner.kind, event["namespace"], event["labels"][owner.label])
                workers.mark(key, urgent=event["type"] is not None)

    return mark


def _find_owners(resources: Sequence[Resource]) -> dict[ObjectKind, list[Resource]]:
    """Return, for every kind of child and grandchild, the resources that own objects of this kind."""
    owned = [kind for kind in watched_kinds(resources) if kind not in {resource.kind for resource in resources}]
    return {kind: [r for r in resources if kind in (*r.children, *r.grandchildren)] for kind in owned}


def _register(registry: kopf.OperatorRegistry, kind: ObjectKind, mark: _Handler) -> None:
    group, version, plural = kind.group, kind.version, kind.plural
    kopf.on.event(group=group, version=version, plural=plural, registry=registry)(mark)


def _build_cleanup(end: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def clean_up(**_: Any) -> None:
        await end()

    return clean_up
