"""One gateway is killed: only its own requests may fail; the other one serves on, and the metric is never 0."""

import asyncio
import json
import time
from typing import Any

import pytest

from conveyor_api.names import DEMAND_PATH, GATEWAY_ADMIN_PORT
from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

BODY = {"model": "door", "max_tokens": 60, "min_tokens": 30, "temperature": 0.8}
CLIENTS = 12
IN_SYSTEM = ("-n", kube.SYSTEM_NAMESPACE)


@pytest.mark.alone
async def test_one_gateway_killed_fails_at_most_its_own_requests(namespace: str) -> None:
    kube.apply(service("door"), namespace)
    kube.wait_ready("door", namespace)
    gateways = kube.wait_until("two gateways", find_two_gateways)
    url = service_url("door", namespace)
    async with running_load(url, BODY, concurrency=CLIENTS) as load:
        names = [pod["metadata"]["name"] for pod in gateways]
        for name in names:  # otherwise the one that stays may have no request yet, and 0 would be right
            await asyncio.to_thread(kube.wait_until, f"requests at {name}", lambda name=name: count(name, namespace))
        reading = asyncio.create_task(asyncio.to_thread(read_for, 15, namespace))
        await asyncio.to_thread(kube.kubectl, "delete", "pod", names[0], *IN_SYSTEM, "--grace-period=0", "--force")
        values = await reading
        settled = len(load.answers)
        await asyncio.to_thread(kube.wait_until, "more answers", lambda: len(load.answers) > settled + CLIENTS, 60)
    # At most the running requests, and one more on each connection that is reused.
    assert len(load.failed) <= 2 * CLIENTS, [a.error for a in load.failed]
    assert not [a.error for a in load.answers[settled:] if a.error]
    assert values
    assert 0 not in values, values  # the HPA would take pods away
    assert any(values), values


def find_two_gateways() -> list[dict[str, Any]] | None:
    """Return the gateways that are not being deleted, if two are ready. An earlier story may have restarted them."""
    pods = kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-gateway")
    staying = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    return staying if len(staying) == 2 and all(map(is_ready, staying)) else None


def is_ready(pod: dict[str, Any]) -> bool:
    conditions = {each["type"]: each["status"] for each in pod["status"].get("conditions", [])}
    return conditions.get("Ready") == "True"


def count(gateway: str, namespace: str) -> int:
    """Return how many requests the gateway holds for the service."""
    path = f"/api/v1/namespaces/{kube.SYSTEM_NAMESPACE}/pods/{gateway}:{GATEWAY_ADMIN_PORT}/proxy{DEMAND_PATH}"
    demand = json.loads(kube.kubectl("get", "--raw", path))
    return int(demand["services"][f"{namespace}/door"]["in_flight"])


def read_for(seconds: float, namespace: str) -> list[float | None]:
    end = time.monotonic() + seconds
    values = []
    while time.monotonic() < end:
        values.append(read_in_flight(namespace))
    return values


def read_in_flight(namespace: str) -> float | None:
    """What the HPA reads; None while the metrics API says that it does not know."""
    path = f"/apis/custom.metrics.k8s.io/v1beta2/namespaces/{namespace}/inferenceservices.conveyor.dev/door"
    try:
        answer = kube.kubectl("get", "--raw", f"{path}/inference_in_flight")
    except kube.CommandFailed as error:
        if "ServiceUnavailable" in str(error):
            return None
        raise
    return float(json.loads(answer)["items"][0]["value"])
