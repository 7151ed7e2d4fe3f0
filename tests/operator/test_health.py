"""Tests the answers to probes."""

import pytest
from aiohttp import ClientSession

from conveyor_operator.health import Health, HealthServer
from conveyor_operator.metrics import Metrics, ServiceState


class Fixture:
    def __init__(self) -> None:
        self.running_seconds = 0.0
        self.health = Health(lambda: self.running_seconds)
        self.metrics = Metrics()
        self.server = HealthServer(self.health, self.metrics, "127.0.0.1", 0)

    async def get(self, path: str) -> tuple[int, str]:
        async with ClientSession() as client, client.get(f"http://127.0.0.1:{self.server.port}{path}") as answer:
            return answer.status, await answer.text()


@pytest.fixture
async def served():
    fixture = Fixture()
    await fixture.server.start()
    yield fixture
    await fixture.server.stop()


async def test_a_waiting_process_is_alive_and_not_ready(served: Fixture) -> None:
    served.health.waiting_for = "the CRD"
    assert await served.get("/livez") == (200, "alive; waiting for: the CRD\n")
    assert await served.get("/readyz") == (503, "the CRD\n")


async def test_a_working_process_is_ready(served: Fixture) -> None:
    served.health.waiting_for = ""
    assert await served.get("/readyz") == (200, "ready\n")


async def test_a_process_that_stands_by_is_ready_and_has_one_metric(served: Fixture) -> None:
    served.health.leads = False
    served.metrics.services.put("default", "qwen", ServiceState((("Ready", "True", "Ready"),), {"ready": 1}))
    assert await served.get("/livez") == (200, "alive; waiting for: starting\n")
    assert await served.get("/readyz") == (200, "standing by\n")
    names = {line.split()[0] for line in (await served.get("/metrics"))[1].splitlines() if line[0] != "#"}
    assert names == {"conveyor_operator_leader"}


async def test_a_process_with_a_stuck_reconcile_fails_its_liveness_probe(served: Fixture) -> None:
    served.running_seconds = 299
    assert (await served.get("/livez"))[0] == 200
    served.running_seconds = 301
    assert await served.get("/livez") == (500, "a reconcile has been running for 301 s\n")


async def test_metrics_are_in_prometheus_words(served: Fixture) -> None:
    status, text = await served.get("/metrics")
    assert status == 200
    assert "# TYPE conveyor_operator_reconcile_seconds histogram" in text


async def test_other_paths_are_not_found(served: Fixture) -> None:
    assert (await served.get("/"))[0] == 404
