"""Compares real HPA, operator, metrics server and gateway while engines start: who fits a batch asks for no engine."""

import asyncio
import json
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from tests.cli.kubectl.test_explained_service import Explained, count, has_read
from tests.gateway.cluster import Cluster
from tests.gateway.engine_servers import SlowEngine, running_engine
from tests.gateway.process import GatewayProcess
from tests.metrics.aggregation import Aggregated
from tests.operator.kubelet import Kubelet, crashed, ready, running
from tests.operator.stage import Space, wait_until

Json = dict[str, Any]


SPEC: Json = {
    "batching": {"maxBatchSize": 4},
    "autoscaling": {"maxReplicas": 4},
    "queue": {"timeout": "10m"},
}


def starting(pod: Json) -> Json:
    return running(pod, ready=False)


def crashing(pod: Json) -> Json:
    return crashed(pod, 1, "Traceback")


@pytest.fixture
def gateway(aggregated: Aggregated, space: Space, own_address: str) -> Iterator[GatewayProcess]:
    """A gateway that the metrics server reads."""
    flags = ("--host", "", "--watch-namespaces", space.namespace, "--drain-delay-seconds", "0")
    with GatewayProcess(aggregated.plane.kubeconfig, *flags) as gateway:
        aggregated.set_gateways(SimpleNamespace(server_address=(own_address, gateway.admin_port)))  # type: ignore[arg-type]
        yield gateway


async def send(http: aiohttp.ClientSession, gateway: GatewayProcess, space: Space) -> None:
    async with http.post(f"{gateway.url}/{space.namespace}/qwen/v1/completions", json={}) as answer:
        await answer.read()


def expect_settled(space: Space, in_flight: int, replicas: int, number_starting: int) -> None:
    """Wait until the HPA has read this metric with this number of replicas, of which so many start."""

    def settled() -> bool:
        status = space.need("InferenceService", "qwen").get("status") or {}
        hpa = space.need("HorizontalPodAutoscaler", "qwen-engine").get("status") or {}
        is_read = hpa.get("currentReplicas") == replicas and has_read(in_flight)(hpa)
        return is_read and count(space) == replicas and status.get("startingReplicas") == number_starting

    wait_until(f"{in_flight} in flight at {replicas}, {number_starting} starting", settled)


@pytest.mark.slow
async def test_requests_that_fit_the_batches_of_starting_engines_start_no_others(
    space: Space, aggregated: Aggregated, gateway: GatewayProcess
) -> None:
    explained = Explained(space, aggregated.plane.kubeconfig, None)  # type: ignore[arg-type]  the gateway is real
    expect = partial(expect_settled, space)
    space.make_service(**SPEC)
    with Kubelet(space, starting, addresses=False) as kubelet:
        await asyncio.to_thread(wait_until, "an HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine"))
        async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
            tasks = [group.create_task(send(http, gateway, space)) for _ in range(4)]
            await asyncio.to_thread(expect, 3, 1, 1)
            text = await asyncio.to_thread(explained.explain)
            assert "4 requests wait; 1 starting engine has 4 places; 0 beyond them." in text
            tasks += [group.create_task(send(http, gateway, space)) for _ in range(5)]
            await asyncio.to_thread(expect, 9, 3, 3)
            assert [event["message"] for event in space.list("Event") if event["reason"] == "Scaled"] == [
                "scaled 1 -> 3: inference_in_flight 9 / 3 -> 3; inference_queue_depth 3 / 1 -> 3; the larger is 3; "
                "beyond the requests for which 1 starting engine has 4 places"
            ]
            kubelet.decide = crashing
            tasks += [group.create_task(send(http, gateway, space)) for _ in range(11)]
            await asyncio.to_thread(expect, 9, 3, 0)
            found = json.loads(await asyncio.to_thread(explained.explain, "-o", "json"))
            assert (found["requests"], found["desiredReplicas"]) == ({"all": 20, "waiting": 20}, 3)
            kubelet.decide = starting
            await asyncio.to_thread(expect, 15, 4, 4)
            for task in tasks:
                task.cancel()


@pytest.mark.slow
async def test_requests_of_a_start_fill_the_batch_and_one_more_starts_an_engine(
    space: Space, aggregated: Aggregated, gateway: GatewayProcess, own_address: str
) -> None:
    """The engine holds its requests. Pods have no addresses, so the test publishes the engine."""
    expect = partial(expect_settled, space)
    space.make_service(**SPEC)
    async with running_engine(SlowEngine().handle) as engine, aiohttp.ClientSession() as http:
        with Kubelet(space, starting, addresses=False) as kubelet:
            await asyncio.to_thread(wait_until, "an HPA", lambda: space.get("HorizontalPodAutoscaler", "qwen-engine"))
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(send(http, gateway, space)) for _ in range(4)]
                await asyncio.to_thread(expect, 3, 1, 1)
                kubelet.decide = ready
                Cluster(space.api, space.namespace).apply_engine("qwen", own_address, engine.port)
                await asyncio.to_thread(expect, 3, 1, 0)
                tasks.append(group.create_task(send(http, gateway, space)))
                kubelet.decide = lambda pod: None  # another pod stays as it is
                await asyncio.to_thread(expect, 5, 2, 1)
                for task in tasks:
                    task.cancel()
    assert not [event for event in space.list("Event") if event["message"].startswith("scaled 1 -> 3")]
