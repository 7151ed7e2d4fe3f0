"""vLLM as an InferenceService's engine: it chats, scales on the queue and is rolled, and no answer is cut off."""

import asyncio
from typing import Any

import aiohttp
import pytest

from e2e import kube, vllm
from e2e.gateway import service_url
from e2e.load import Load, running_load, stream_chat
from e2e.services import service

pytestmark = pytest.mark.brings_vllm

NAME = "other"
BODY = {"model": NAME, "max_tokens": 100, "min_tokens": 60, "temperature": 0.8}


def the_service(**engine: Any) -> dict[str, Any]:
    quick = [{"type": "Pods", "value": 1, "periodSeconds": 5}]
    behavior = {"scaleDown": {"stabilizationWindowSeconds": 10, "policies": quick}}
    autoscaling = {"maxReplicas": 2, "behavior": behavior}
    batching = {"maxBatchSize": 4, "maxBatchTokens": 1024}
    cache = {"blockBudget": 256, "blockSize": 32}  # vLLM's attention on CPUs wants multiples of 32
    rollout = {"maxSurge": 1, "maxUnavailable": 0}  # a start takes longer than a request waits
    queue = {"timeout": "5m"}  # twelve requests share four places while the second pod starts on the same processor
    return service(
        NAME,
        batching=batching,
        kvCache=cache,
        autoscaling=autoscaling,
        rollout=rollout,
        queue=queue,
        **vllm.spec(**engine),
    )


@pytest.mark.timeout(2400)
async def test_vllm_is_served_scaled_and_rolled_without_a_cut(namespace: str) -> None:
    kube.apply(the_service(), namespace)
    await asyncio.to_thread(kube.wait_until, "vLLM is ready", lambda: ready(namespace) == 1, 1200)
    url = service_url(NAME, namespace)
    await answers(url)
    async with running_load(url, BODY, concurrency=12) as up:
        await asyncio.to_thread(kube.wait_until, "two ready pods", lambda: ready(namespace) == 2, 1200)
        await asyncio.sleep(5)
    async with running_load(url, BODY, concurrency=2) as down:
        await asyncio.to_thread(kube.wait_until, "one pod", lambda: pods(namespace) == 1, 300)
    async with running_load(url, BODY, concurrency=2) as rolled:
        before = names_of(namespace)
        kube.apply(the_service(args=["--enforce-eager", "--seed=1"]), namespace)
        await asyncio.to_thread(
            kube.wait_until, "the pods are new", lambda: not names_of(namespace) & before and ready(namespace), 1200
        )
    for load in (up, down, rolled):
        assert_whole(load)


async def answers(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/models") as response:
            assert [model["id"] for model in (await response.json())["data"]] == [NAME]
        answer = await stream_chat(session, url, {**BODY, "messages": [{"role": "user", "content": "What is a list?"}]})
        assert answer.error is None
        assert answer.text
        async with session.get(f"{url.removesuffix('/v1')}/openapi.json") as response:
            assert response.status == 200, await response.text()
            assert "/v1/chat/completions" in str((await response.json())["paths"].keys())


def assert_whole(load: Load) -> None:
    """Check that no answer was cut. vLLM ends a cut answer without an error; only its finish reason differs."""
    assert load.answers
    assert not load.failed, [answer.error for answer in load.failed]
    assert {answer.finish_reason for answer in load.answers} <= {"stop", "length"}


def ready(namespace: str) -> int:
    found = kube.get("deployment", f"{NAME}-engine", namespace) or {}
    return int((found.get("status") or {}).get("readyReplicas", 0))


def names_of(namespace: str) -> set[str]:
    found = kube.list_("pods", namespace, f"conveyor.dev/inference-service={NAME}")
    return {pod["metadata"]["name"] for pod in found}


def pods(namespace: str) -> int:
    return len(names_of(namespace))
