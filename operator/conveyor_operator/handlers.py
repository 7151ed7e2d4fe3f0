"""Everything Kopf calls: index functions remember, a change marks a key dirty, nothing else happens here.

`build_registry` is called once by `process`. No change handlers, timers or daemons: they would write annotations and
finalizers onto the resource (docs/adr/0003). Kopf's indexes are used for their order alone: it calls the index
function before the event handler of the same object, and those of everything that exists before the first event.
What they remember is kept in our `store`, since Kopf's own indexes never lose what `relist` finds to be gone.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from conveyor_api import names
from conveyor_operator.kinds import (
    AUTOSCALER,
    CHILDREN,
    DEPLOYMENT,
    ENDPOINT_SLICE,
    GRANDCHILDREN,
    INFERENCE_SERVICE,
    POD,
    Kind,
)
from conveyor_operator.observed import (
    Child,
    observe_autoscaler,
    observe_child,
    observe_deployment,
    observe_ready_endpoints,
)
from conveyor_operator.pods import observe_pod
from conveyor_operator.session import KopfSession
from conveyor_operator.store import Store
from conveyor_operator.workers import Key, Workers

_Projection = Callable[[Any], Any]
_Handler = Callable[..., Awaitable[None]]

_PROJECTIONS: dict[Kind, _Projection] = {
    DEPLOYMENT: lambda body: (observe_child(body), observe_deployment(body)),
    AUTOSCALER: lambda body: (observe_child(body), observe_autoscaler(body)),
    POD: observe_pod,
    ENDPOINT_SLICE: observe_ready_endpoints,
}


def build_registry(
    store: Store, workers: Workers, session: KopfSession, end: Callable[[], Awaitable[None]]
) -> kopf.OperatorRegistry:
    """All handlers of the operator; Kopf awaits `end` when it stops."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(session.login)
    kopf.on.cleanup(registry=registry)(_build_cleanup(end))
    _register(registry, INFERENCE_SERVICE, *build_resource_handlers(store, workers), labels=None)
    for kind in (*CHILDREN, *GRANDCHILDREN):
        _watch_belongings(registry, store, workers, kind)
    return registry


def configure(settings: kopf.OperatorSettings) -> None:
    """Kopf as a watcher only: no peering, no scanning, no posting; our children are filtered by the API server."""
    settings.peering.standalone = True
    settings.scanning.disabled = True
    settings.posting.enabled = False
    settings.networking.request_timeout = 30
    settings.networking.enforce_retry_after = True
    settings.process.ultimate_exiting_timeout = 20
    for kind in (*CHILDREN, *GRANDCHILDREN):
        settings.watching.label_selectors[kind.group, kind.version, kind.plural] = names.INFERENCE_SERVICE_LABEL


def build_resource_handlers(store: Store, workers: Workers) -> tuple[_Handler, _Handler]:
    """The index function and the event handler of InferenceServices; called by `build_registry`, and by their test."""

    async def remember(**event: Any) -> None:
        body = event["body"]
        metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        key = (event["namespace"], event["name"])
        store.put(INFERENCE_SERVICE, event["uid"], key, {**body, "metadata": metadata})

    async def mark(**event: Any) -> None:
        key = (event["namespace"], event["name"])
        if event["type"] == "DELETED":
            store.drop(INFERENCE_SERVICE, event["uid"])
            if store.resource(key) is None:
                workers.cancel(key)
                return
        # Another one may have come under this name already: Kopf's order is that of one uid.
        workers.mark(key, generation=int(event["meta"].get("generation", 0)))

    return remember, mark


def _watch_belongings(registry: kopf.OperatorRegistry, store: Store, workers: Workers, kind: Kind) -> None:
    project: _Projection = _PROJECTIONS.get(kind, _project_child)

    async def remember(**event: Any) -> None:
        left = store.put(kind, event["uid"], _owner_key(event), project({**event["body"], "kind": kind.kind}))
        if left is not None:  # its label was changed; the event names only the new service
            workers.mark(left)

    async def mark(**event: Any) -> None:
        if event["type"] == "DELETED":
            store.drop(kind, event["uid"])
        workers.mark(_owner_key(event))

    _register(registry, kind, remember, mark, labels={names.INFERENCE_SERVICE_LABEL: kopf.PRESENT})


def _project_child(body: Any) -> tuple[Child, None]:
    return observe_child(body), None


def _owner_key(event: Mapping[str, Any]) -> Key:
    return event["namespace"], event["labels"][names.INFERENCE_SERVICE_LABEL]


def _register(
    registry: kopf.OperatorRegistry,
    kind: Kind,
    remember: _Handler,
    mark: _Handler,
    labels: Mapping[str, Any] | None,
) -> None:
    group, version, plural = kind.group, kind.version, kind.plural
    kopf.index(group=group, version=version, plural=plural, id=plural, labels=labels, registry=registry)(remember)
    kopf.on.event(group=group, version=version, plural=plural, labels=labels, registry=registry)(mark)


def _build_cleanup(end: Callable[[], Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def clean_up(**_: Any) -> None:
        await end()

    return clean_up
