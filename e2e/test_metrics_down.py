"""The metrics API is down: the HPA holds the replicas it has, ScalingReady becomes False, and scaling goes on later."""

import asyncio

import pytest

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import quickstart

BODY = {"model": "held", "max_tokens": 100, "min_tokens": 60, "temperature": 0.8}
CLIENTS = 24  # a busy machine leaves some of them without a request
METRICS = ("deployment/conveyor-metrics", "-n", kube.SYSTEM_NAMESPACE)


@pytest.mark.long
@pytest.mark.xdist_group("chart")
async def test_without_the_metrics_api_the_hpa_holds(namespace: str) -> None:
    body = quickstart()
    body["metadata"]["name"] = "held"
    body["spec"]["autoscaling"]["maxReplicas"] = 2
    kube.apply(body, namespace)
    kube.wait_ready("held", namespace)
    async with running_load(service_url("held", namespace), BODY, concurrency=CLIENTS) as load:
        await asyncio.to_thread(kube.wait_until, "two ready pods", lambda: ready(namespace) == 2, 240)
        kube.kubectl("scale", *METRICS, "--replicas=0")
        try:  # the load goes on until no metrics server runs: a condition from before could be False too
            await asyncio.to_thread(kube.wait_until, "no metrics server runs", lambda: not metrics_pods(), 60)
            await asyncio.to_thread(kube.wait_until, "ScalingReady is False", lambda: blind(namespace), 60)
            assert not load.failed, [answer.error for answer in load.failed]
            assert desired(namespace) == 2, "the HPA has scaled down under load"
        except BaseException:
            kube.kubectl("scale", *METRICS, "--replicas=2")
            raise
    try:
        await asyncio.sleep(25)  # no load, several HPA periods, past the window of 10 s
        assert desired(namespace) == 2
    finally:
        kube.kubectl("scale", *METRICS, "--replicas=2")
    await asyncio.to_thread(kube.wait_until, "back at one pod", lambda: ready(namespace) == 1, 180)


def ready(namespace: str) -> int:
    status = (kube.get("deployment", "held-engine", namespace) or {}).get("status") or {}
    return int(status.get("readyReplicas", 0))


def desired(namespace: str) -> int:
    """Return what the HPA has set. An engine on a busy node may be unready for a moment."""
    return int(kube.get("deployment", "held-engine", namespace)["spec"]["replicas"])  # type: ignore[index]


def metrics_pods() -> list[kube.Object]:
    return kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-metrics")


def blind(namespace: str) -> bool:
    return kube.condition(kube.get("infsvc", "held", namespace), "ScalingReady").get("status") == "False"
