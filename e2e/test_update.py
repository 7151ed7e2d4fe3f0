"""A spec is edited under load: the pods roll, no request fails and no stream is cut, whether or not a GPU is spare."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from e2e import kube
from e2e.cluster.gpus import COUNT
from e2e.gateway import service_url
from e2e.hub_of_demo import REPOSITORY, from_hub, running_hub
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "update", "max_tokens": 100, "min_tokens": 60, "temperature": 0.8}


@pytest.mark.parametrize(
    "spec", [{"rollout": {"maxSurge": 1, "maxUnavailable": 0}}, {}], ids=["one-more", "one-less-for-its-volume"]
)
async def test_a_spec_edit_under_load_rolls_the_pods_and_fails_nothing(spec: dict[str, Any], namespace: str) -> None:
    kube.apply(service("update", replicas=1, **spec), namespace)
    kube.wait_ready("update", namespace)
    before = pods(namespace)
    async with running_load(service_url("update", namespace), BODY, concurrency=4) as load:
        await asyncio.sleep(3)
        kube.apply(service("update", replicas=1, **spec, kvCache={"blockBudget": 192}), namespace)
        await asyncio.to_thread(kube.wait_until, "the old pod is gone", lambda: rolled(namespace, before), 240)
        begun = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "the new pod answers", lambda: len(load.answers) > begun + 4, 60)
    assert not load.failed, [a.error for a in load.failed]
    kube.wait_ready("update", namespace)


@pytest.mark.parametrize("gpus", [1, COUNT // 2 + 1], ids=["a-gpu-is-spare", "none-is"])
async def test_a_lone_replica_is_replaced_as_there_is_room(gpus: int, namespace: str, tmp_path: Path) -> None:
    """It brings its successor beside itself, or makes room for it, and requests wait in the gateway."""
    with running_hub(tmp_path) as hub:
        model = {"uri": f"hf://{REPOSITORY}", "name": "update"}
        body = from_hub(hub, service("update", replicas=1, model=model))
        body["spec"]["resources"]["limits"]["nvidia.com/gpu"] = gpus
        await asyncio.to_thread(kube.apply, body, namespace)
        await asyncio.to_thread(kube.wait_ready, "update", namespace)
        before = pods(namespace)
        async with running_load(service_url("update", namespace), BODY, concurrency=4) as load:
            await asyncio.sleep(3)
            body["spec"]["kvCache"] = {"blockBudget": 192}
            await asyncio.to_thread(kube.apply, body, namespace)
            await asyncio.to_thread(kube.wait_until, "the old pod is gone", lambda: rolled(namespace, before), 240)
            begun = len(load.answers)
            await asyncio.to_thread(kube.wait_until, "the new pod answers", lambda: len(load.answers) > begun + 4, 60)
        assert not load.failed, [a.error for a in load.failed]


def pods(namespace: str) -> set[str]:
    selector = "conveyor.dev/inference-service=update"
    return {pod["metadata"]["name"] for pod in kube.list_("pods", namespace, selector)}


def rolled(namespace: str, before: set[str]) -> bool:
    now = pods(namespace)
    return bool(now) and not now & before
