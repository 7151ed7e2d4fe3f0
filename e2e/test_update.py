"""A spec is edited under load: the pod is replaced, with or without a spare GPU, or stays if the edit is wrong.

No request fails, and no stream is cut.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e import kube
from e2e.cluster.gpus import COUNT
from e2e.cluster.images import IMAGES
from e2e.gateway import service_url
from e2e.hub_of_demo import REPOSITORY, from_hub, running_hub
from e2e.load import running_load
from e2e.services import service

NAME = "update"
BODY = {"model": NAME, "max_tokens": 200, "min_tokens": 150, "temperature": 0.8}

CONTEXT = 512
WRONG = "registry.example.com/conveyor/engine:nope"


@pytest.fixture
def hub_model(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A service whose pods share no volume."""
    with running_hub(tmp_path) as hub:
        yield from_hub(hub, service(NAME, replicas=1, model={"uri": f"hf://{REPOSITORY}", "name": NAME}))


async def test_another_engine_image_where_all_nodes_may_mount_the_volume(namespace: str) -> None:
    """The edit sets another name of the same image. The new pod starts beside the old one."""
    edit = {"engine": {"device": "Auto", "image": IMAGES["engine"].loaded_last}}
    await assert_replaced(service(NAME, replicas=1), edit, namespace)


@pytest.mark.nightly  # the story above shows the same of a volume, the one below the same of a hub
async def test_a_lone_replica_brings_its_successor_beside_itself_where_a_gpu_is_spare(
    hub_model: dict[str, Any], namespace: str
) -> None:
    """The successor has the sizes that follow from the declared workload, and the status tells them."""
    del hub_model["spec"]["engine"]["maxModelLen"]  # which would override the workload
    lengths = {"inputTokens": {"p50": 16, "p95": 32}, "outputTokens": {"p50": 150, "p95": 200}}
    await assert_replaced(hub_model, {"workload": lengths}, namespace)
    status = (kube.get("infsvc", NAME, namespace) or {})["status"]
    values = {each["name"]: each["value"] for each in status["effective"]["derived"]}
    assert values["engine.maxModelLen"] == f"{CONTEXT} tokens"
    assert "kvCache.blockBudget" not in values, "the spec says it"
    body = {"model": NAME, "prompt": "a", "max_tokens": CONTEXT}
    answer = await asyncio.to_thread(httpx.post, f"{service_url(NAME, namespace)}/completions", json=body)
    assert answer.status_code == 400, "the model alone could have twice as many tokens"
    assert str(CONTEXT) in answer.json()["error"]["message"]


@pytest.mark.xdist_group("most GPUs")
async def test_a_lone_replica_makes_room_for_its_successor_where_no_gpu_is_spare(
    hub_model: dict[str, Any], namespace: str
) -> None:
    """Requests wait in the gateway meanwhile."""
    hub_model["spec"]["resources"]["limits"]["nvidia.com/gpu"] = COUNT // 2 + 1
    hub_model["spec"]["engine"]["tensorParallelSize"] = 1
    await assert_replaced(hub_model, {"kvCache": {"blockBudget": 192}}, namespace)


@pytest.mark.nightly
async def test_a_wrong_image_leaves_the_only_engine_of_a_shared_volume(namespace: str) -> None:
    await assert_kept(service(NAME, replicas=1), namespace)


@pytest.mark.nightly
@pytest.mark.xdist_group("most GPUs")
async def test_a_wrong_image_leaves_the_only_engine_where_no_gpu_is_spare(
    hub_model: dict[str, Any], namespace: str
) -> None:
    """A Job without a GPU tries the image before the engine makes room."""
    hub_model["spec"]["resources"]["limits"]["nvidia.com/gpu"] = COUNT // 2 + 1
    hub_model["spec"]["engine"]["tensorParallelSize"] = 1
    await assert_kept(hub_model, namespace)


async def assert_kept(body: dict[str, Any], namespace: str) -> None:
    """Edit the image under load: the engine stays, no request fails, and the condition names the image."""
    await asyncio.to_thread(kube.apply, body, namespace)
    await asyncio.to_thread(kube.wait_ready, NAME, namespace)
    before = pods(namespace)
    wrong = {**body["spec"], "engine": {**body["spec"]["engine"], "image": WRONG}}
    async with running_load(service_url(NAME, namespace), BODY, concurrency=4) as load:
        await asyncio.to_thread(kube.wait_until, "streams run", lambda: load.tokens > 20)
        await asyncio.to_thread(kube.apply, {**body, "spec": wrong}, namespace)
        await asyncio.to_thread(kube.wait_until, "the cause", lambda: reports_image(namespace), 240)
        begun = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "the old pod answers", lambda: len(load.answers) > begun + 8, 60)
    assert not load.failed, [a.error for a in load.failed]
    assert before <= pods(namespace)


def reports_image(namespace: str) -> bool:
    found = kube.get("infsvc", NAME, namespace)
    progressing, ready = kube.condition(found, "Progressing"), kube.condition(found, "Ready")
    statuses = (progressing.get("status"), progressing.get("reason"), ready.get("status"))
    return statuses == ("False", "ImagePullFailed", "True") and WRONG in ready["message"]


async def assert_replaced(body: dict[str, Any], edit: dict[str, Any], namespace: str) -> None:
    await asyncio.to_thread(kube.apply, body, namespace)
    await asyncio.to_thread(kube.wait_ready, NAME, namespace)
    before = pods(namespace)
    async with running_load(service_url(NAME, namespace), BODY, concurrency=4) as load:
        await asyncio.to_thread(kube.wait_until, "streams run", lambda: load.tokens > 20)
        await asyncio.to_thread(kube.apply, {**body, "spec": {**body["spec"], **edit}}, namespace)
        await asyncio.to_thread(kube.wait_until, "the old pod is gone", lambda: rolled(namespace, before), 240)
        begun = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "the new pod answers", lambda: len(load.answers) > begun + 4, 60)
    assert not load.failed, [a.error for a in load.failed]
    await asyncio.to_thread(kube.wait_ready, NAME, namespace)


def pods(namespace: str) -> set[str]:
    selector = f"conveyor.dev/inference-service={NAME}"
    return {pod["metadata"]["name"] for pod in kube.list_("pods", namespace, selector)}


def rolled(namespace: str, before: set[str]) -> bool:
    now = pods(namespace)
    return bool(now) and not now & before
