"""Tests scaling to zero and back. A real operator learns from real gateways which services to stop and to start."""

import asyncio
import json
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from tests.gateway.cluster import Cluster, own_address, publish_gateway
from tests.gateway.engine_servers import answering, running_engine
from tests.gateway.process import GatewayProcess
from tests.operator.kubelet import Kubelet, fetch_failed, ready
from tests.operator.stage import Space, Stage, wait_until

SLEEPY = {"minReplicas": 0, "maxReplicas": 2, "idleTimeout": "5s"}
STARTING = (200, {"status": "starting"})
NO_TIMEOUT = aiohttp.ClientTimeout(total=120)


@pytest.fixture
def node(stage: Stage) -> Iterator[Kubelet]:
    with stage.operator(), Kubelet(stage.space, ready, addresses=False) as node:
        yield node


@pytest.fixture
def cluster(space: Space) -> Cluster:
    return Cluster(space.api, space.namespace)


@pytest.fixture
async def engine() -> AsyncIterator[int]:
    async with running_engine(answering(web.json_response, data={"text": "hello"})) as engine:
        yield engine.port


def replicas(space: Space) -> int:
    return int(space.need("Deployment", "qwen-engine")["spec"]["replicas"])


async def fall_asleep(space: Space, gateway: GatewayProcess, cluster: Cluster, port: int) -> None:
    """Create a service with one engine, and wait until it has none.

    Pods have no addresses, so the test publishes its engine.
    """
    space.make_service(autoscaling=SLEEPY)
    await asyncio.to_thread(space.wait_condition, "qwen", "WorkloadReady", "True", "ReplicasReady")
    cluster.apply_engine("qwen", own_address(), port)
    await asyncio.to_thread(space.wait_condition, "qwen", "Ready", "True", "ScaledToZero")
    assert replicas(space) == 0
    cluster.delete_engine("qwen", port)
    health = f"{gateway.url}/{space.namespace}/qwen/health"
    await asyncio.to_thread(wait_until, "the gateway knows", lambda: get(health) == (200, {"status": "asleep"}))


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


async def complete(gateway: GatewayProcess, space: Space) -> tuple[int, Any]:
    url = f"{gateway.url}/{space.namespace}/qwen/v1/completions"
    async with aiohttp.ClientSession(timeout=NO_TIMEOUT) as http, http.post(url, json={}) as answer:
        return answer.status, await answer.json()


@pytest.mark.slow
async def test_a_service_without_requests_goes_to_zero_and_the_first_request_is_answered(
    stage: Stage, node: Kubelet, gateway: GatewayProcess, cluster: Cluster, engine: int
) -> None:
    space = stage.space
    begun = time.monotonic()
    await fall_asleep(space, gateway, cluster, engine)
    assert time.monotonic() - begun > 5, "not before its idle timeout"
    request = asyncio.create_task(complete(gateway, space))
    await asyncio.to_thread(wait_until, "an engine is asked for", lambda: replicas(space) == 1)
    await asyncio.to_thread(space.wait_condition, "qwen", "WorkloadReady", "True", "ReplicasReady")
    assert not request.done(), "it is held until an engine is there"
    await asyncio.to_thread(space.wait_condition, "qwen", "Ready", "True", "StartingFromZero")
    base = f"{gateway.url}/{space.namespace}/qwen"
    await asyncio.to_thread(wait_until, "the gateway knows", lambda: get(f"{base}/health") == STARTING)
    assert get(f"{base}/openapi.json")[0] == 200
    cluster.apply_engine("qwen", own_address(), engine)
    assert await request == (200, {"text": "hello"})
    events = [event["message"] for event in space.list("Event") if event["reason"] == "Scaled"]
    assert events == ["scaled 0 -> 1: requests are queued"]


@pytest.mark.slow
async def test_at_zero_a_service_says_that_it_answers_and_a_probe_does_not_wake_it(
    stage: Stage, node: Kubelet, gateway: GatewayProcess, cluster: Cluster, engine: int
) -> None:
    await fall_asleep(stage.space, gateway, cluster, engine)
    base = f"{gateway.url}/{stage.space.namespace}/qwen"
    for path in ("/health", "/ping", "/version", "/v1/models", "/openapi.json"):
        assert get(base + path)[0] == 200, path
    await asyncio.sleep(1)  # two looks of the operator
    assert replicas(stage.space) == 0


@pytest.mark.slow
async def test_an_edit_at_zero_wakes_nobody_and_counts_as_untried_until_an_engine_runs_it(
    stage: Stage, node: Kubelet, gateway: GatewayProcess, cluster: Cluster, engine: int
) -> None:
    space = stage.space
    await fall_asleep(space, gateway, cluster, engine)

    def is_untried() -> bool:
        return "no engine has started with the current spec yet" in space.condition("qwen", "Ready")["message"]

    assert not is_untried()
    space.edit("qwen", queue={"timeout": "90s"})  # no pod is another one for it
    await asyncio.to_thread(space.wait_observed, "qwen")
    assert not is_untried()
    space.edit("qwen", engine={"maxModelLen": 64})
    await asyncio.to_thread(wait_until, "it is told", is_untried)
    assert replicas(space) == 0
    request = asyncio.create_task(complete(gateway, space))
    await asyncio.to_thread(space.wait_condition, "qwen", "WorkloadReady", "True", "ReplicasReady")
    cluster.apply_engine("qwen", own_address(), engine)
    assert (await request)[0] == 200
    await asyncio.to_thread(space.wait_condition, "qwen", "Ready", "True", "ScaledToZero")
    assert not is_untried()


@pytest.mark.slow
async def test_a_start_that_fails_answers_with_the_reason_until_it_is_fixed(
    stage: Stage, node: Kubelet, gateway: GatewayProcess, cluster: Cluster, engine: int
) -> None:
    space = stage.space
    await fall_asleep(space, gateway, cluster, engine)
    node.decide = lambda pod: fetch_failed(pod, "ModelNotFound", "no folder nowhere")
    status, body = await complete(gateway, space)  # waits, and is answered when the failure is known
    assert (status, body["error"]["code"]) == (503, "start_failed")
    assert "ModelNotFound" in body["error"]["message"]
    assert "kubectl" not in body["error"]["message"]
    assert (await complete(gateway, space))[0] == 503
    node.decide = lambda pod: None
    space.edit("qwen", model={"uri": "pvc://models/there"})
    await asyncio.to_thread(space.wait_observed, "qwen")
    request = asyncio.create_task(complete_when_queued(gateway, space))
    node.decide = ready
    await asyncio.to_thread(space.wait_condition, "qwen", "WorkloadReady", "True", "ReplicasReady")
    cluster.apply_engine("qwen", own_address(), engine)
    assert await request == (200, {"text": "hello"})


async def complete_when_queued(gateway: GatewayProcess, space: Space) -> tuple[int, Any]:
    """Complete a request that may be queued first, because the gateway may learn of the fix after the test."""
    while True:
        status, body = await complete(gateway, space)
        if status != 503:
            return status, body


@pytest.mark.slow
async def test_while_a_gateway_cannot_be_read_no_engine_goes(
    stage: Stage, node: Kubelet, gateway: GatewayProcess, cluster: Cluster, engine: int
) -> None:
    space = stage.space
    publish_gateway(space.api, space.namespace, "two", 1)  # nobody listens there
    space.make_service(autoscaling=SLEEPY)
    cluster.apply_engine("qwen", own_address(), engine)
    await asyncio.to_thread(space.wait_condition, "qwen", "WorkloadReady", "True", "ReplicasReady")
    await asyncio.to_thread(
        wait_until, "the other calls it idle", lambda: json.loads(gateway.admin("/activity")[1])["idle"]
    )
    await asyncio.sleep(1)  # two looks of the operator
    assert replicas(space) == 1
    publish_gateway(space.api, space.namespace, "two", 1, serving=False)  # it has ended, Kubernetes says
    await asyncio.to_thread(wait_until, "its engine has gone", lambda: replicas(space) == 0)
