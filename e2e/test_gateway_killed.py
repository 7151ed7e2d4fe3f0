"""One gateway dies: only its own requests may fail; the other gateway serves on, and the metric holds."""

import asyncio

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "door", "max_tokens": 60, "min_tokens": 30, "temperature": 0.8}


async def test_one_gateway_killed_fails_at_most_its_own_requests(namespace: str) -> None:
    kube.apply(service("door"), namespace)
    kube.wait_ready("door", namespace)
    gateways = kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-gateway")
    assert len(gateways) == 2
    url = service_url("door", namespace)
    async with running_load(url, BODY, concurrency=4) as load:
        await asyncio.sleep(3)
        kube.kubectl(
            "delete", "pod", gateways[0]["metadata"]["name"], "-n", kube.SYSTEM_NAMESPACE, "--grace-period=0", "--force"
        )
        await asyncio.sleep(10)
        settled = len(load.answers)
        await asyncio.sleep(5)
    assert len(load.failed) <= 4 + 4, [a.error for a in load.failed]  # running ones, and connections reused once
    later = load.answers[settled:]
    assert later
    assert not [a.error for a in later if a.error]


async def test_a_gateway_that_is_restarted_drains_and_fails_nothing(namespace: str) -> None:
    kube.apply(service("door"), namespace)
    kube.wait_ready("door", namespace)
    async with running_load(service_url("door", namespace), BODY, concurrency=4) as load:
        await asyncio.sleep(2)
        kube.kubectl("rollout", "restart", "deployment/conveyor-gateway", "-n", kube.SYSTEM_NAMESPACE)
        await asyncio.to_thread(
            kube.kubectl, "rollout", "status", "deployment/conveyor-gateway", "-n", kube.SYSTEM_NAMESPACE,
            "--timeout=170s",
        )  # fmt: skip
        await asyncio.sleep(5)
    assert load.answers
    assert not load.failed, [a.error for a in load.failed]
