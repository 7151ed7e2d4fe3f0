"""Measures how fast the API server creates services' children for clients that do nothing else.

Used by `reconcile`. The first client only applies the children. The second one makes all calls that the operator makes
for a new service, but it watches and decides nothing. So an operator with these calls cannot be faster. Both use the
operator's `Cluster`, with as many concurrent calls as the operator has workers.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from tests.operator.builders import build
from tests.operator.stage import Space, make_service

from conveyor_api import names
from conveyor_api.served_name import build_served_name
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.inferenceservice.kinds import CHILDREN, INFERENCE_SERVICE
from conveyor_operator.kinds import DEPLOYMENT, SERVED_NAME
from conveyor_operator.metrics import Metrics
from conveyor_operator.settings import Settings
from e2e.cluster.api import Api

_KINDS = {kind.kind: kind for kind in CHILDREN}
_STATUSES = ({"observedGeneration": 1}, {"observedGeneration": 1, "desiredReplicas": 1})

Object = dict[str, Any]


def measure_bare(api: Api, kubeconfig: Path, specs: Sequence[Object]) -> dict[str, float]:
    """Return the children created per second, for each client. Each spec is one service, whose children are applied."""
    rates = {}
    for namespace, call in (("bare", _apply_all), ("bare-limit", _call_all)):
        space = Space(api, namespace)
        api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
        made = [space.create("InferenceService", make_service(f"bare-{n}", **spec)) for n, spec in enumerate(specs)]
        services = [(body, _build(body, spec)) for body, spec in zip(made, specs, strict=True)]
        began = time.monotonic()
        asyncio.run(_for_each(kubeconfig, services, call))
        rates[namespace] = sum(len(children) for _, children in services) / (time.monotonic() - began)
        for body in made:  # the operator is measured next, with its own services
            space.delete("InferenceService", body["metadata"]["name"])
    return {"bare_children_per_second": rates["bare"], "limit_children_per_second": rates["bare-limit"]}


def _build(service: Object, spec: Object) -> list[Object]:
    """Return the service's children, without the operator's labels."""
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    children = []
    for (_, child_name), child in build(**spec).items():
        metadata = {"name": child_name.replace("qwen", name), "namespace": namespace, "labels": {"bare": name}}
        children.append({**child, "metadata": metadata})
    return children


async def _apply_all(cluster: Cluster, service: Object, children: Sequence[Object]) -> None:
    for child in children:
        await cluster.apply(_KINDS[child["kind"]], child, names.FIELD_MANAGER)


async def _call_all(cluster: Cluster, service: Object, children: Sequence[Object]) -> None:
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    await cluster.create(SERVED_NAME, build_served_name(namespace, name))
    await cluster.get(DEPLOYMENT, namespace, names.engine_name(name))
    for child in children:
        await cluster.apply(_KINDS[child["kind"]], child, names.FIELD_MANAGER, must_be_new=True)
    for status in _STATUSES:
        await cluster.replace_status(INFERENCE_SERVICE, service, status)


async def _for_each(
    kubeconfig: Path,
    services: Sequence[tuple[Object, Sequence[Object]]],
    call: Callable[[Cluster, Object, Sequence[Object]], Awaitable[None]],
) -> None:
    waiting = iter(services)
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(await load_configuration(str(kubeconfig)), Metrics()))

        async def work() -> None:
            for service, children in waiting:
                await call(cluster, service, children)

        await asyncio.gather(*(work() for _ in range(Settings().workers)))
