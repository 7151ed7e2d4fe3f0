"""Pods and processes that leave in good order while long streams run: each stream ends whole, and no request fails.

The stories of one worker share a service; after `scale_down` it has one replica.
"""

import asyncio
from collections.abc import Callable

import pytest

from e2e import deploy, kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

NAME = "calm"
# A pod waits 5 s before it drains. The streams must take longer than that, even on an idle machine.
BODY = {"model": NAME, "max_tokens": 900, "min_tokens": 700, "temperature": 0.8}
SLOW = {"requests": {"cpu": "100m"}, "limits": {"nvidia.com/gpu": 1, "cpu": "500m"}}
ENGINES = f"conveyor.dev/inference-service={NAME}"


@pytest.fixture(scope="module")
def calm(shared_namespace: str) -> str:
    """The namespace of a service with two engines."""
    kube.apply(service(NAME, replicas=2, resources=SLOW, queue={"timeout": "3m"}), shared_namespace)
    kube.wait_until("two engines", lambda: ready(shared_namespace) == 2)
    return shared_namespace


def delete_the_pods(namespace: str) -> None:
    """Delete all pods at once, so that requests wait for the new ones."""
    before = engines(namespace)
    kube.kubectl("delete", "pods", "-l", ENGINES, "-n", namespace, "--wait=false")
    wait_replaced(before, namespace)


def drain_the_node(namespace: str) -> None:
    """Drain the only node.

    It is uncordoned after the eviction of the first engine, while the second one waits for its turn.
    """
    before = engines(namespace)
    (node,) = {pod["spec"]["nodeName"] for pod in kube.list_("pods", namespace, ENGINES)}
    drain = ("drain", node, f"--pod-selector={ENGINES}", "--delete-emptydir-data", "--timeout=170s")
    with kube.in_background(*drain):
        kube.wait_until("an engine waits for a node", lambda: engines(namespace) - before)
        kube.kubectl("uncordon", node)
    wait_replaced(before, namespace)


def scale_down(namespace: str) -> None:
    kube.kubectl("scale", f"infsvc/{NAME}", "-n", namespace, "--replicas=1")
    kube.wait_until("one engine", lambda: len(engines(namespace)) == 1)


def roll_the_gateways(namespace: str) -> None:
    gateways = ("deployment/conveyor-gateway", "-n", kube.SYSTEM_NAMESPACE)
    kube.kubectl("rollout", "restart", *gateways)
    kube.kubectl("rollout", "status", *gateways, "--timeout=170s")


def upgrade_the_chart(namespace: str) -> None:
    """Replace the operator, gateways and metrics API twice, by changing their log level. The engines stay."""
    before = engines(namespace)
    try:
        deploy.install(*(f"{process}.logLevel=debug" for process in ("operator", "gateway", "metrics")))
    finally:
        deploy.deploy()
    assert engines(namespace) == before


CALM, CHART = (pytest.mark.xdist_group(name) for name in ("calm", "chart"))


@pytest.mark.long
@pytest.mark.parametrize(
    "event",
    [
        pytest.param(delete_the_pods, marks=[CALM, pytest.mark.nightly]),  # drained pods leave in the same way
        pytest.param(drain_the_node, marks=CALM),
        pytest.param(scale_down, marks=CALM),
        pytest.param(roll_the_gateways, marks=CALM),
        pytest.param(upgrade_the_chart, marks=CHART),
    ],
)
async def test_no_stream_is_cut(event: Callable[[str], None], calm: str) -> None:
    async with running_load(service_url(NAME, calm), BODY, concurrency=4) as load:
        await asyncio.to_thread(kube.wait_until, "streams run", lambda: load.tokens > 20)
        await asyncio.to_thread(event, calm)
        begun = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "streams go on", lambda: len(load.answers) > begun)
    assert not load.failed, [answer.error for answer in load.failed]


def ready(namespace: str) -> int:
    status = (kube.get("infsvc", NAME, namespace) or {}).get("status") or {}
    return int(status.get("readyReplicas", 0))


def engines(namespace: str) -> set[str]:
    return {pod["metadata"]["name"] for pod in kube.list_("pods", namespace, ENGINES)}


def wait_replaced(before: set[str], namespace: str) -> None:
    kube.wait_until("others in their place", lambda: not engines(namespace) & before and ready(namespace) == 2)
