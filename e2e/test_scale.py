"""A service scales up and down on the queue, through the cluster's own HPA, and no stream is cut."""

import asyncio
from typing import Any

import pytest

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import quickstart

BODY = {"model": "scale", "max_tokens": 120, "min_tokens": 80, "temperature": 0.8}


@pytest.mark.nightly  # `make demo` in test_quickstart.py scales 1 -> 3 -> 1, test_no_stream_is_cut.py down under load
async def test_the_queue_scales_the_service_up_and_down_and_cuts_no_stream(namespace: str) -> None:
    body = quickstart()
    body["metadata"]["name"] = "scale"
    kube.apply(body, namespace)
    kube.wait_ready("scale", namespace)
    url = service_url("scale", namespace)
    async with running_load(url, BODY, concurrency=10) as load:
        await asyncio.to_thread(kube.wait_until, "three ready pods", lambda: ready(namespace) == 3, 240)
        await asyncio.sleep(5)
    # A lighter load goes on while pods leave: their streams must end whole.
    async with running_load(url, BODY, concurrency=2) as light:
        await asyncio.to_thread(kube.wait_until, "back at one pod", lambda: replicas(namespace) == 1, 240)
    for answers in (load, light):
        assert answers.answers
        assert not answers.failed, [a.error for a in answers.failed]
    await asyncio.to_thread(kube.wait_until, "the HPA knows the queue", lambda: is_scaling_ready(namespace), 60)


def is_scaling_ready(namespace: str) -> bool:
    return kube.condition(kube.get("infsvc", "scale", namespace), "ScalingReady").get("status") == "True"


def deployment(namespace: str) -> dict[str, Any]:
    return (kube.get("deployment", "scale-engine", namespace) or {}).get("status") or {}


def ready(namespace: str) -> int:
    return int(deployment(namespace).get("readyReplicas", 0))


def replicas(namespace: str) -> int:
    return int(deployment(namespace).get("replicas", 0))
