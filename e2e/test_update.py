"""A spec is edited under load: the pods roll, no request fails and no stream is cut."""

import asyncio
from typing import Any

import pytest

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "update", "max_tokens": 100, "min_tokens": 60, "temperature": 0.8}


@pytest.mark.parametrize(
    "spec", [{"rollout": {"maxSurge": 1, "maxUnavailable": 0}}, {}], ids=["one-more", "one-less-by-default"]
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


def pods(namespace: str) -> set[str]:
    selector = "conveyor.dev/inference-service=update"
    return {pod["metadata"]["name"] for pod in kube.list_("pods", namespace, selector)}


def rolled(namespace: str, before: set[str]) -> bool:
    now = pods(namespace)
    return bool(now) and not now & before
