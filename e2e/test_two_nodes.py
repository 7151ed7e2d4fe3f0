"""Two nodes, with engines and the chart's pods on both: one is drained, loses its power or its network, and returns.

Only the local cluster gets a second node. While a node is lost, requests go to the gateway on the other node, at the
address of its pod: the cluster's Service leads to gateways of the lost node until Kubernetes marks them as not ready.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from e2e import kube
from e2e.cluster import load, local
from e2e.cluster.node import FIRST
from e2e.cluster.second import NAME, SecondNode
from e2e.gateway import service_url
from e2e.load import Answer, running_load
from e2e.services import service

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

PROCESSES = ("operator", "gateway", "metrics")
BOTH = [FIRST.name, NAME]
RESOURCES = {"requests": {"cpu": "100m"}, "limits": {"cpu": "1"}}
EVICTED_SOON = [  # Kubernetes' default is 300 s
    {"key": f"node.kubernetes.io/{taint}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 5}
    for taint in ("unreachable", "not-ready")
]
TO_SECOND = {"key": "kubernetes.io/hostname", "operator": "In", "values": [NAME]}
CLIENTS = 5  # of a service with a target of three requests in flight for each replica


@pytest.fixture(scope="module")
def second() -> Iterator[SecondNode]:
    """A second node. When it leaves, all pods are on the first one."""
    if kube.current_context() != local.CONTEXT:
        pytest.skip("only the local cluster gets a second node")
    node = SecondNode(local.FOLDER)
    node.remove()
    with ExitStack() as stack:
        stack.callback(node.remove)
        stack.callback(kube.kubectl, "delete", "node", NAME, "--ignore-not-found")
        node.start()
        stack.callback(restart_chart)
        stack.callback(kube.kubectl, "cordon", NAME)
        load.load_into_local(node.containerd_socket)
        yield node


@pytest.fixture
def spread(second: SecondNode) -> SecondNode:
    """The second node, with one pod of each of the chart's Deployments."""
    kube.kubectl("uncordon", NAME)
    restart_chart()
    assert {
        process: find_nodes(kube.SYSTEM_NAMESPACE, process_label(process)) for process in PROCESSES
    } == dict.fromkeys(PROCESSES, BOTH)
    return second


def restart_chart() -> None:
    """Replace the chart's pods. New pods are on all nodes that take pods."""
    names = [f"deployment/conveyor-{process}" for process in PROCESSES]
    kube.kubectl("rollout", "restart", *names, "-n", kube.SYSTEM_NAMESPACE)
    wait_chart()


def wait_chart() -> None:
    for process in PROCESSES:
        status = ("rollout", "status", f"deployment/conveyor-{process}", "--timeout=170s")
        kube.kubectl(*status, "-n", kube.SYSTEM_NAMESPACE)


def process_label(process: str) -> str:
    return f"app.kubernetes.io/name=conveyor-{process}"


def engine_label(name: str) -> str:
    return f"conveyor.dev/inference-service={name}"


def find_pods(namespace: str, selector: str) -> list[dict[str, Any]]:
    """Return the pods that are not being deleted."""
    pods = kube.list_("pods", namespace, selector)
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def find_nodes(namespace: str, selector: str) -> list[str]:
    return sorted(pod["spec"].get("nodeName", "") for pod in find_pods(namespace, selector))


def ready_replicas(name: str, namespace: str) -> int:
    deployment = kube.get("deployment", f"{name}-engine", namespace) or {}
    return int((deployment.get("status") or {}).get("readyReplicas", 0))


@pytest.mark.usefixtures("spread")
async def test_a_node_that_is_drained_fails_no_request(namespace: str) -> None:
    kube.apply(service("drained", replicas=2, resources=RESOURCES, queue={"timeout": "3m"}), namespace)
    await asyncio.to_thread(kube.wait_until, "two engines", lambda: ready_replicas("drained", namespace) == 2)
    assert find_nodes(namespace, engine_label("drained")) == BOTH
    body = {"model": "drained", "max_tokens": 300, "min_tokens": 200, "temperature": 0.8}
    async with running_load(service_url("drained", namespace), body, concurrency=4) as streams:
        await asyncio.to_thread(kube.wait_until, "streams run", lambda: streams.tokens > 20)
        drain = ("drain", NAME, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=170s")
        await asyncio.to_thread(kube.kubectl, *drain)
        await asyncio.to_thread(kube.wait_until, "two engines", lambda: ready_replicas("drained", namespace) == 2)
        begun = len(streams.answers)
        await asyncio.to_thread(kube.wait_until, "more answers", lambda: len(streams.answers) > begun + 8)
    assert not streams.failed, [answer.error for answer in streams.failed]
    assert find_nodes(namespace, engine_label("drained")) == 2 * [FIRST.name]


@pytest.mark.parametrize("has_power", [False, True], ids=["without power", "without network"])
async def test_a_node_that_is_lost_fails_only_the_streams_of_its_engines(
    spread: SecondNode, namespace: str, record_property: Callable[[str, object], None], has_power: bool
) -> None:
    """`both` has an engine on each node, `alone` has its only engine on the lost one."""
    lead_from_second()
    autoscaling = {"minReplicas": 1, "maxReplicas": 4, "behavior": {"scaleDown": {"stabilizationWindowSeconds": 30}}}
    preferred = {"weight": 100, "preference": {"matchExpressions": [TO_SECOND]}}
    near = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}}
    pod = {"tolerations": EVICTED_SOON}
    kube.apply(service("both", resources=RESOURCES, pod=pod, autoscaling=autoscaling), namespace)
    kube.apply(service("alone", resources=RESOURCES, pod={**pod, "affinity": near}, queue={"timeout": "5m"}), namespace)
    await asyncio.to_thread(kube.wait_ready, "alone", namespace)
    gateway = find_gateway(FIRST.name)
    body = {"max_tokens": 300, "min_tokens": 200, "temperature": 0.8}
    async with (
        running_load(f"{gateway}/{namespace}/both/v1", {**body, "model": "both"}, CLIENTS) as both,
        running_load(f"{gateway}/{namespace}/alone/v1", {**body, "model": "alone"}, 1) as alone,
    ):
        await asyncio.to_thread(kube.wait_until, "two engines", lambda: ready_replicas("both", namespace) == 2)
        assert find_nodes(namespace, engine_label("both")) == BOTH
        assert find_nodes(namespace, engine_label("alone")) == [NAME]
        lost = {pod["status"]["podIP"] for pod in find_pods(namespace, "") if pod["spec"]["nodeName"] == NAME}
        desired = Desired(namespace)
        desired.start()
        spread.disconnect()
        lost_at = time.monotonic()
        if not has_power:
            await asyncio.to_thread(spread.lose_power)
        await asyncio.to_thread(kube.wait_until, "NodeLost", lambda: reasons(namespace) == ["NodeLost", "NodeLost"])
        known_after = time.monotonic() - lost_at
        await asyncio.to_thread(kube.wait_until, "other engines", lambda: all_on_first(namespace))
        replaced_after = time.monotonic() - lost_at
        staying = {pod["metadata"]["uid"] for pod in find_pods(namespace, "")}
        await asyncio.sleep(10)
        await asyncio.to_thread(spread.connect if has_power else spread.start)
        restored_at = time.monotonic()
        await asyncio.to_thread(kube.wait_until, "the lost pods' end", lambda: len(kube.list_("pods", namespace)) == 3)
        await asyncio.to_thread(wait_chart)
        returned_after = time.monotonic() - restored_at
        async with running_load(f"{find_gateway(NAME)}/{namespace}/both/v1", {**body, "model": "both"}, 1) as returned:
            await asyncio.to_thread(kube.wait_until, "its gateway answers", lambda: len(returned.answers) > 5)
        await asyncio.sleep(10)
        in_flight = read_in_flight("both", namespace)
    assert desired.end() == {2}
    assert {pod["metadata"]["uid"] for pod in kube.list_("pods", namespace)} == staying
    assert 0 < in_flight <= CLIENTS
    assert not returned.failed, [answer.error for answer in returned.failed]
    failed = [*both.failed, *alone.failed]
    assert not [answer.error for answer in failed if not had_begun(answer, lost_at)]
    assert all("error event" in str(answer.error) for answer in failed), [answer.error for answer in failed]
    assert {find_engine(answer, gateway) for answer in failed} <= lost
    seconds = [answer.finished - answer.started for answer in both.answers if answer.finished and not answer.error]
    record_property(
        "figure",
        f"NodeLost after {known_after:.0f} s, replaced after {replaced_after:.0f} s, right {returned_after:.0f} s after"
        f" the return; {len(both.answers) + len(alone.answers)} streams, {len(failed)} were cut off; of the service"
        f" with another engine, {sum(each > 20 for each in seconds)} took more than 20 s, at most {max(seconds):.0f} s",
    )


def lead_from_second() -> None:
    """Let the operator on the second node lead."""

    def leads() -> bool:
        lease = kube.get("lease", "conveyor-operator", kube.SYSTEM_NAMESPACE) or {"spec": {}}
        holder = lease["spec"].get("holderIdentity") or ""
        for pod in find_pods(kube.SYSTEM_NAMESPACE, process_label("operator")):
            if holder.startswith(pod["metadata"]["name"]) and pod["spec"]["nodeName"] != NAME:
                kube.kubectl("delete", "pod", pod["metadata"]["name"], "-n", kube.SYSTEM_NAMESPACE)
                return False
            if holder.startswith(pod["metadata"]["name"]):
                return True
        return False

    kube.wait_until("the second node's operator leads", leads)


def find_gateway(node: str) -> str:
    """Return the URL of the gateway on a node."""
    pods = find_pods(kube.SYSTEM_NAMESPACE, process_label("gateway"))
    (address,) = (pod["status"]["podIP"] for pod in pods if pod["spec"]["nodeName"] == node)
    return f"http://{address}:8080"


def find_engine(answer: Answer, gateway: str) -> str:
    """Return the address of the engine that sent this answer, as the gateway's receipt names it."""
    admin = gateway.replace(":8080", ":8081")
    (receipt,) = httpx.get(f"{admin}/receipt", params={"id": answer.request_id}).raise_for_status().json()
    return str(receipt["engine"]).rpartition(":")[0]


def reasons(namespace: str) -> list[str]:
    services = (kube.get("infsvc", name, namespace) for name in ("both", "alone"))
    return [str(kube.condition(each, "Ready").get("reason")) for each in services]


def all_on_first(namespace: str) -> bool:
    nodes = find_nodes(namespace, "")
    return nodes == 3 * [FIRST.name] and reasons(namespace) == ["Ready", "Ready"]


def had_begun(answer: Answer, at: float) -> bool:
    """Return whether the client had got a part of the answer at that time."""
    return answer.first_token_seconds is not None and answer.started + answer.first_token_seconds <= at


def read_in_flight(name: str, namespace: str) -> float:
    """Return what the HPA reads."""
    path = f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/inferenceservices.conveyor.dev/{name}"
    return float(json.loads(kube.kubectl("get", "--raw", f"{path}/inference_in_flight"))["items"][0]["value"])


class Desired(threading.Thread):
    """Collects once a second how many replicas of `both` its HPA and its Deployment want."""

    def __init__(self, namespace: str) -> None:
        super().__init__(name="desired", daemon=True)
        self._namespace, self._over, self._seen = namespace, threading.Event(), set[int]()

    def run(self) -> None:
        while not self._over.wait(1):
            hpa, deployment = (kube.get(kind, "both-engine", self._namespace) or {} for kind in ("hpa", "deployment"))
            self._seen |= {hpa["status"]["desiredReplicas"], deployment["spec"]["replicas"]}

    def end(self) -> set[int]:
        self._over.set()
        self.join()
        return self._seen
