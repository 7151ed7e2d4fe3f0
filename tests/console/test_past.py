"""Tests the past of a service on the pages of a console process, with and without a Prometheus."""

import asyncio
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.console.process import ConsoleProcess, make_reader
from tests.console.test_console import READY, set_ready
from tests.console.test_prometheus import count_up
from tests.gateway.cluster import Cluster

from e2e.cluster.api import Api


def read_state(page: str) -> dict[str, str]:
    """Return the values at the chosen time by name."""
    return dict(re.findall(r'class="value">([^<]+) <b>([^<]*)</b>', page))


def test_without_prometheus_a_slider_leads_through_the_last_minutes(
    console: ConsoleProcess, cluster: Cluster, token: str
) -> None:
    cluster.apply_service("qwen")
    path = f"/services/{cluster.namespace}/qwen"
    console.wait_for("qwen", token)
    for ready in (1, 2):
        set_ready(cluster, "qwen", READY, readyReplicas=ready, desiredReplicas=2)
        console.wait_for(f'<span class="value">ready <b>{ready}</b></span>', token, f"{path}/past")
    page = console.get(f"{path}/past", token).text
    assert read_state(page)["ready"] == "2"
    assert re.findall(r'name="span" value="(\w+)"', page) == ["15m"]
    first, last, step = (float(re.findall(rf'{name}="([\d.]+)"', page)[0]) for name in ("min", "max", "step"))
    times = [first + number * step for number in range(round((last - first) / step))]
    states = [read_state(console.get(f"{path}/past?at={at}", token).text)["ready"] for at in times]
    assert states == sorted(states)
    assert states[0] != "2"
    for at in ("9999999999", "nan", "x", "1e999"):
        assert read_state(console.get(f"{path}/past?at={at}&span=x", token).text)["ready"] == "2"
    assert f'hx-get="{path}/past"' in console.get(path, token).text


def test_who_may_not_see_a_service_does_not_see_its_past(
    console: ConsoleProcess, crd: Api, cluster: Cluster, token: str
) -> None:
    cluster.apply_service("qwen")
    console.wait_for("qwen", token)
    other = make_reader(crd, "default", f"of-{cluster.namespace}")
    assert console.get(f"/services/{cluster.namespace}/qwen/past", other).status == 404
    assert console.get("/services/default/other/past", token).status == 404


@pytest.fixture
def port() -> int:
    """A port at which nothing listens until a test uses it."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@pytest.fixture
def with_prometheus(kubeconfig: Path, system_namespace: str, port: int) -> Iterator[ConsoleProcess]:
    with ConsoleProcess(kubeconfig, system_namespace, "--prometheus-url", f"http://127.0.0.1:{port}") as started:
        yield started


async def test_with_prometheus_a_span_can_be_chosen_and_without_an_answer_the_memory_is_shown(
    with_prometheus: ConsoleProcess, port: int, cluster: Cluster, token: str
) -> None:
    console, path = with_prometheus, f"/services/{cluster.namespace}/qwen"
    await asyncio.to_thread(cluster.apply_service, "qwen")
    await asyncio.to_thread(console.wait_for, "qwen", token)
    away = await asyncio.to_thread(console.get, f"{path}/past?span=7d", token)
    assert (away.status, "Prometheus does not answer" in away.text) == (200, True)
    assert "event=prometheus_unreadable" in console.log

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        fields = await request.post()
        return await count_up({name: str(value) for name, value in fields.items()})

    runner = web.ServerRunner(web.Server(handle))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    at = time.time() - 147 * 480  # the 34th of 181 points in 86,400 s
    page = (await asyncio.to_thread(console.get, f"{path}/past?span=1d&at={at}", token)).text
    await runner.cleanup()
    assert set(read_state(page).values()) in ({"33", "33 s"}, {"34", "34 s"})
    assert re.findall(r'value="(\w+)" checked', page) == ["1d"]
    assert page.count("<polyline") == 6
