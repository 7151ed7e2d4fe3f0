"""Everything Kopf calls: indexes remember, events mark a key dirty, nothing else happens here.

`build_registry` is called once by `process`. No change handlers, timers or daemons: they would write annotations and
finalizers onto the resource (docs/adr/0003). Kopf fills an index before it calls the event handler of the same
object, and lists everything before the first event.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import kopf

from conveyor_api import names
from conveyor_operator.cluster import load_configuration
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
from conveyor_operator.store import Store
from conveyor_operator.workers import Key, Workers

_Projection = Callable[[Any], Any]

_PROJECTIONS: dict[Kind, _Projection] = {
    DEPLOYMENT: lambda body: (observe_child(body), observe_deployment(body)),
    AUTOSCALER: lambda body: (observe_child(body), observe_autoscaler(body)),
    POD: observe_pod,
    ENDPOINT_SLICE: observe_ready_endpoints,
}


def build_registry(store: Store, workers: Workers, kubeconfig: str | None) -> kopf.OperatorRegistry:
    """All handlers of the operator."""
    registry = kopf.OperatorRegistry()
    kopf.on.login(registry=registry)(_build_login(kubeconfig))
    kopf.on.startup(registry=registry)(_build_startup(store))
    kopf.on.cleanup(registry=registry)(_build_cleanup(workers))
    _watch_resource(registry, workers)
    for kind in (*CHILDREN, *GRANDCHILDREN):
        _watch_belongings(registry, workers, kind)
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


def _watch_resource(registry: kopf.OperatorRegistry, workers: Workers) -> None:
    async def remember(**event: Any) -> dict[Key, Any]:
        body = event["body"]
        metadata = {key: value for key, value in body["metadata"].items() if key != "managedFields"}
        return {(event["namespace"], event["name"]): {**body, "metadata": metadata}}

    async def mark(**event: Any) -> None:
        key = (event["namespace"], event["name"])
        if event["type"] == "DELETED":
            workers.cancel(key)
        else:
            workers.mark(key, generation=int(event["meta"].get("generation", 0)))

    _register(registry, INFERENCE_SERVICE, remember, mark, labels=None)


def _watch_belongings(registry: kopf.OperatorRegistry, workers: Workers, kind: Kind) -> None:
    project: _Projection = _PROJECTIONS.get(kind, _project_child)

    async def remember(**event: Any) -> dict[Key, Any]:
        return {_owner_key(event): project({**event["body"], "kind": kind.kind})}

    async def mark(**event: Any) -> None:
        workers.mark(_owner_key(event))

    _register(registry, kind, remember, mark, labels={names.INFERENCE_SERVICE_LABEL: kopf.PRESENT})


def _project_child(body: Any) -> tuple[Child, None]:
    return observe_child(body), None


def _owner_key(event: Mapping[str, Any]) -> Key:
    return event["namespace"], event["labels"][names.INFERENCE_SERVICE_LABEL]


def _register(
    registry: kopf.OperatorRegistry,
    kind: Kind,
    remember: Callable[..., Any],
    mark: Callable[..., Any],
    labels: Mapping[str, Any] | None,
) -> None:
    group, version, plural = kind.group, kind.version, kind.plural
    kopf.index(group=group, version=version, plural=plural, id=plural, labels=labels, registry=registry)(remember)
    kopf.on.event(group=group, version=version, plural=plural, labels=labels, registry=registry)(mark)


def _build_login(kubeconfig: str | None) -> Callable[..., Awaitable[kopf.ConnectionInfo]]:
    async def login(**_: Any) -> kopf.ConnectionInfo:
        """The same credentials as `cluster`, read anew whenever Kopf finds that its own have ended."""
        found = await load_configuration(kubeconfig)
        # "bearer TOKEN" in a pod, "Bearer TOKEN" from a kubeconfig: the client writes the scheme either way.
        header: str | None = await found.get_api_key_with_prefix("BearerToken")
        return kopf.ConnectionInfo(
            server=found.host,
            ca_path=found.ssl_ca_cert,
            insecure=not found.verify_ssl,
            certificate_path=found.cert_file,
            private_key_path=found.key_file,
            token=header.split()[-1] if header else None,
        )

    return login


def _build_startup(store: Store) -> Callable[..., Awaitable[None]]:
    kinds = (INFERENCE_SERVICE, *CHILDREN, *GRANDCHILDREN)

    async def bind(**kwargs: Any) -> None:
        store.bind({kind: kwargs[kind.plural] for kind in kinds})

    return bind


def _build_cleanup(workers: Workers) -> Callable[..., Awaitable[None]]:
    async def stop(**_: Any) -> None:
        await workers.stop()

    return stop
