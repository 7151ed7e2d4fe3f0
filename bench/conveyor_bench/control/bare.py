"""Measures how fast the API server applies the same children for a client that does nothing else.

Used by `reconcile`. The client is the operator's own, with as many concurrent calls as the operator has workers. The
children have neither an owner nor the operator's labels, so the garbage collector and the operator ignore them.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.operator.builders import build

from conveyor_api import names
from conveyor_kube.kubeconfig import load_configuration
from conveyor_operator.cluster import Cluster
from conveyor_operator.inferenceservice.kinds import CHILDREN
from conveyor_operator.metrics import Metrics
from conveyor_operator.settings import Settings
from e2e.cluster.api import Api

_KINDS = {kind.kind: kind for kind in CHILDREN}


def measure_bare(api: Api, kubeconfig: Path, specs: Sequence[dict[str, Any]]) -> float:
    """Return how many children the API server applied per second. For each spec, a service's children are applied."""
    namespace = "bare"
    api.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    children = [child for number, spec in enumerate(specs) for child in _build(f"bare-{number}", namespace, spec)]
    began = time.monotonic()
    asyncio.run(_apply(kubeconfig, children))
    return len(children) / (time.monotonic() - began)


def _build(name: str, namespace: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    made = []
    for (_, child_name), child in build(**spec).items():
        metadata = {"name": child_name.replace("qwen", name), "namespace": namespace, "labels": {"bare": name}}
        made.append({**child, "metadata": metadata})
    return made


async def _apply(kubeconfig: Path, children: Sequence[dict[str, Any]]) -> None:
    waiting = iter(children)
    async with contextlib.AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(Cluster(await load_configuration(str(kubeconfig)), Metrics()))

        async def work() -> None:
            for child in waiting:
                await cluster.apply(_KINDS[child["kind"]], child, names.FIELD_MANAGER)

        await asyncio.gather(*(work() for _ in range(Settings().workers)))
