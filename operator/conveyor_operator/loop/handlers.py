"""Everything Kopf calls: a change marks a key dirty, nothing else happens here.

`build_registry` is called once by `process`. No change handlers, timers or daemons: they would write annotations and
finalizers onto the resource (docs/adr/0003). What an object says is in the `store` before Kopf hears of it (`watches`).
"""

from collections.abc import Awaitable, Callable
from typing import Any

import kopf

from conveyor_api import names
from conveyor_operator.inferenceservice.kinds import CHILDREN, GRANDCHILDREN, INFERENCE_SERVICE
from conveyor_operator.kinds import Kind
from conveyor_operator.loop.session import KopfSession
from conveyor_operator.loop.store import Store
from conveyor_operator.loop.workers import Workers

_Handler = Callable[..., Awaitable[None]]


def build_registry(
    store: Store, workers: Workers, session: KopfSession, end: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """All handlers of the operator; Kopf awaits `end` when it stops."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(session.login)
    kopf.on.cleanup(registry=registry)(_build_cleanup(end))
    _register(registry, INFERENCE_SERVICE, build_service_handler(store, workers), labels=None)
    mark_owner = _build_owner_handler(workers)
    for kind in (*CHILDREN, *GRANDCHILDREN):
        _register(registry, kind, mark_owner, labels={names.INFERENCE_SERVICE_LABEL: kopf.PRESENT})
    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    """Kopf as a watcher only: no peering, no scanning, no posting; our children are filtered by the API server."""
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.watching.initial_streaming = True
    settings.networking.request_timeout = 30
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = 20
    for kind in (*CHILDREN, *GRANDCHILDREN):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = names.INFERENCE_SERVICE_LABEL


def build_service_handler(store: Store, workers: Workers) -> _Handler:
    """The event handler of InferenceServices; called by `build_registry`, and by its test."""

    async def mark(**event: Any) -> None:
        key = (event["namespace"], event["name"])
        if event["type"] == "DELETED" and store.uid(key) is None:
            workers.cancel(key)
            return
        # Another one may have come under a deleted one's name already: Kopf's order is that of one uid.
        workers.mark(key, generation=int(event["meta"].get("generation", 0)))

    return mark


def _build_owner_handler(workers: Workers) -> _Handler:
    async def mark(**event: Any) -> None:
        workers.mark((event["namespace"], event["labels"][names.INFERENCE_SERVICE_LABEL]))

    return mark


def _register(registry: kopf.OperatorRegistry, kind: Kind, mark: _Handler, labels: Any) -> None:
    group, version, plural = kind.group, kind.version, kind.plural
    kopf.index(group=group, version=version, plural=plural, id=plural, labels=labels, registry=registry)(_index_nothing)
    kopf.on.event(group=group, version=version, plural=plural, labels=labels, registry=registry)(mark)


async def _index_nothing(**_: Any) -> None:
    """Kopf calls no event handler before everything that has an index function was listed."""


def _build_cleanup(end: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def clean_up(**_: Any) -> None:
        await end()

    return clean_up
