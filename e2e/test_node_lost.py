"""The node stops reporting: its engine answers all requests, and the status names the node until it is back.

The kubelet is stopped by a signal, which only the local cluster allows. All pods are on this node, the gateways too.
The cluster's proxy leaves them out like all others, so requests go to the address of a gateway's pod.
"""

import json
import os
import signal
import time
import urllib.error
import urllib.request

import pytest

from e2e import kube
from e2e.cluster.local import FOLDER
from e2e.cluster.processes import Processes
from e2e.services import service

pytestmark = [pytest.mark.alone, pytest.mark.nightly]

NAME = "kept"
BODY = json.dumps({"model": NAME, "prompt": "with open(", "max_tokens": 4}).encode()
LOST_SECONDS = 30.0  # that the node stays lost


def test_an_engine_whose_node_stopped_reporting_answers_all_requests(namespace: str) -> None:
    if kube.current_context() != "conveyor-local":
        pytest.skip("only on the local cluster can a story stop the kubelet")
    kube.apply(service(NAME), namespace)
    kube.wait_ready(NAME, namespace)
    before = pods(namespace)
    gateway = kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-gateway")[0]
    url = f"http://{gateway['status']['podIP']}:8080/{namespace}/{NAME}/v1/completions"
    (kubelet,) = (each.pid for each in Processes(FOLDER, die_with_parent=False).recorded() if each.name == "kubelet")
    codes = [complete(url)]

    def find_lost() -> str:
        """Send a request, and return what the status says about the node; "" before."""
        codes.append(complete(url))
        condition = kube.condition(kube.get("infsvc", NAME, namespace), "Ready")
        return str(condition["message"]) if condition.get("reason") == "NodeLost" else ""

    os.kill(kubelet, signal.SIGSTOP)
    try:
        message = kube.wait_until("NodeLost", find_lost)
        end = time.monotonic() + LOST_SECONDS
        while time.monotonic() < end:
            codes.append(complete(url))
    finally:
        os.kill(kubelet, signal.SIGCONT)
    kube.wait_ready(NAME, namespace)
    codes.append(complete(url))
    assert codes == [200] * len(codes)
    assert "has not reported since" in message
    assert pods(namespace) == before


def complete(url: str) -> int:
    """Return the status of a short request, and wait so that there are about four in a second."""
    time.sleep(0.25)
    request = urllib.request.Request(url, BODY, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def pods(namespace: str) -> set[tuple[str, int]]:
    """Return uid and restarts of each engine."""
    found = kube.list_("pods", namespace)
    return {(pod["metadata"]["uid"], pod["status"]["containerStatuses"][0]["restartCount"]) for pod in found}
