"""The console on a whole cluster with faults: a team's ServiceAccount finds in its pages which service is not well and
why, why a request was slow, and who used what, and sees nothing of another team. Once by HTTP, and once in Chromium."""

import asyncio
import json
import re
import subprocess
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from conveyor_kubectl.forwarding import forwarded
from e2e import browser, kube
from e2e.cluster import programs
from e2e.deploy import install
from e2e.gateway import service_url
from e2e.services import provide_namespace, service

MAX_MEMORY = 100 << 20
LONG = {"messages": [{"role": "user", "content": "Tell me about lists."}], "max_tokens": 200, "ignore_eos": True}
NIGHT = Path(browser.__file__).with_name("night.mjs")
KINDS = "inferenceservices.conveyor.dev,apikeys.conveyor.dev,events"

pytestmark = [pytest.mark.nightly, pytest.mark.xdist_group("chart")]


@dataclass(frozen=True)
class Team:
    """A namespace with services, the keys of its callers by name, and the token of somebody who may look."""

    namespace: str
    keys: dict[str, str]
    token: str


@pytest.fixture(scope="module")
def team(shared_namespace: str) -> Team:
    """The team whose services have faults, on a cluster with the console."""
    install("console.enabled=true", "console.playground=true")
    return Team(shared_namespace, seed(shared_namespace), create_reader(shared_namespace))


@pytest.fixture
def other_team() -> Iterator[str]:
    """The namespace of another team, with a service that cannot start."""
    name = f"other-team-{uuid.uuid4().hex[:5]}"
    provide_namespace(name)
    kube.apply(service("secret", model={"uri": "pvc://nowhere/demo"}), name)
    yield name
    kube.kubectl("delete", "infsvc", "--all", "-n", name, "--timeout=60s")
    kube.kubectl("delete", "namespace", name, "--wait=false")


def seed(namespace: str) -> dict[str, str]:
    """Create services with three faults and one without, and return the keys of two callers."""
    kube.apply(service("lost", model={"uri": "pvc://models/nowhere"}), namespace)
    kube.apply(service("huge", resources={"limits": {"cpu": "900", "nvidia.com/gpu": 1}}), namespace)
    kube.apply(service("busy", batching={"mode": "Continuous", "maxBatchSize": 1}), namespace)
    kube.apply(service("well"), namespace)
    keys = {
        name: kube.kubectl("conveyor", "key", "create", name, "-n", namespace).strip() for name in ("heavy", "light")
    }
    for name in ("busy", "well"):
        kube.wait_ready(name, namespace)
    return keys


def create_reader(namespace: str) -> str:
    """Return the token of an account that may list services, keys and Events of its namespace."""
    kube.kubectl("create", "serviceaccount", "viewer", "-n", namespace)
    kube.kubectl("create", "role", "viewer", "-n", namespace, "--verb=list", f"--resource={KINDS}")
    subject = f"--serviceaccount={namespace}:viewer"
    kube.kubectl("create", "rolebinding", "viewer", "-n", namespace, "--role=viewer", subject)
    return kube.kubectl("create", "token", "viewer", "-n", namespace).strip()


@asynccontextmanager
async def sending(namespace: str, keys: dict[str, str]) -> AsyncIterator[list[str]]:
    """Keep the queue of `busy` full: six requests of `heavy` and one of `light`. Yields the ids of answered ones."""
    answered: list[str] = []

    async def send(http: httpx.AsyncClient, key: str) -> None:
        while True:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await http.post(
                f"{service_url('busy', namespace)}/chat/completions", json={"model": "busy", **LONG}, headers=headers
            )
            if answer.status_code == 200:
                answered.append(answer.headers["X-Request-Id"])
            await asyncio.sleep(0.1)

    async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
        senders = [asyncio.create_task(send(http, keys[name])) for name in ("heavy",) * 6 + ("light",)]
        try:
            yield answered
        finally:
            for each in senders:
                each.cancel()
            await asyncio.gather(*senders, return_exceptions=True)


async def wait_for(http: httpx.AsyncClient, path: str, *patterns: str, seconds: float = 120) -> str:
    """Return the page when it contains all regular expressions."""
    page = ""
    for _ in range(int(seconds)):
        page = (await http.get(path)).text
        if all(re.search(pattern, page) for pattern in patterns):
            return page
        await asyncio.sleep(1)
    raise AssertionError(f"{path} does not contain {patterns}: {re.sub(r'<[^>]*>', ' ', page)}")


def read_memory() -> int:
    """Return the bytes that the console's pod uses, as the kubelet counts them."""
    (pod,) = kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-console")
    node = pod["spec"]["nodeName"]
    summary = json.loads(kube.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
    found = [each for each in summary["pods"] if each["podRef"]["name"] == pod["metadata"]["name"]]
    return int(found[0]["memory"]["workingSetBytes"]) if found else 0


@asynccontextmanager
async def watching(team: Team) -> AsyncIterator[tuple[str, list[str]]]:
    """Yield the console's URL, and the ids of answered requests, while requests wait for `busy`."""
    async with (
        forwarded(kube.SYSTEM_NAMESPACE, "service/conveyor-console", 80, ()) as url,
        sending(team.namespace, team.keys) as answered,
    ):
        yield url, answered


async def test_a_team_finds_its_faults_in_the_console(
    team: Team, other_team: str, request: pytest.FixtureRequest
) -> None:
    namespace = team.namespace
    async with (
        watching(team) as (url, answered),
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {team.token}"}, timeout=60) as http,
    ):
        overview = await wait_for(http, "/", "ModelNotFound", "Unschedulable", f"{namespace}/</span>well")
        rows = re.findall(r'href="/services/[^/]+/(\w+)"', overview)
        assert set(rows[:2]) == {"lost", "huge"}
        assert rows[-1] == "well"
        assert other_team not in overview

        page = f"/services/{namespace}/busy"
        heavy = f'{namespace}/heavy</td><td data-label="Queued">[4-6]<'
        await wait_for(http, page, heavy, f"{namespace}/light</td>", "in the gateway&#39;s")
        await asyncio.to_thread(kube.wait_until, "an answer", lambda: answered, 120)
        told = (await http.get("/requests", params={"id": answered[-1]})).text
        assert re.search(
            rf"{namespace}/busy answered {answered[-1]} with 200 in [\d.]+ m?s: .*generating 200 tokens", told
        )
        events = await wait_for(http, f"/services/{namespace}/lost", "ModelNotFound")
        assert "You may not list Events" not in events

        used = await wait_for(http, "/usage", f"{namespace}/heavy", f"{namespace}/light")
        assert used.index(f"{namespace}/heavy") < used.index(f"{namespace}/light")
        assert other_team not in used
        assert (await http.get(f"/services/{other_team}/secret")).status_code == 404
        assert (await http.get(f"{page}/past")).status_code == 200

        memory = await asyncio.to_thread(kube.wait_until, "the pod's memory", read_memory, 60)
        assert memory < MAX_MEMORY
        request.node.user_properties.append(("figure", f"memory of the console's pod: {memory / (1 << 20):.0f} MiB"))


async def test_a_person_finds_them_in_a_browser_at_night(team: Team, request: pytest.FixtureRequest) -> None:
    packages = await asyncio.to_thread(browser.provide)
    headers = {"Authorization": f"Bearer {team.token}"}
    async with watching(team) as (url, answered):
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            await wait_for(http, "/", "ModelNotFound", "Unschedulable")
            await asyncio.to_thread(kube.wait_until, "an answer", lambda: answered, 120)
            await wait_for(http, "/usage", f"{team.namespace}/heavy")
        command = programs.command("node", NIGHT, url, team.token, team.namespace, browser.PICTURES)
        process = await asyncio.create_subprocess_exec(
            *command, cwd=packages, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), 150)
        finally:
            if process.returncode is None:
                process.kill()
    assert process.returncode == 0, errors.decode()
    for line in output.decode().splitlines():
        request.node.user_properties.append(("figure", f"a script in Chromium found {line}"))
