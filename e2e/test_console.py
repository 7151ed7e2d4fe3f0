"""The console on a whole cluster with faults: a team's ServiceAccount finds in its pages which service is not well and
why, why a request was slow, and who used what, and sees nothing of another team."""

import asyncio
import json
import re
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import httpx
import pytest

from conveyor_kubectl.forwarding import forwarded
from e2e import kube
from e2e.deploy import install
from e2e.gateway import service_url
from e2e.services import provide_namespace, service

MAX_MEMORY = 100 << 20
LONG = {"messages": [{"role": "user", "content": "Tell me about lists."}], "max_tokens": 200, "ignore_eos": True}
KINDS = "inferenceservices.conveyor.dev,apikeys.conveyor.dev,events"


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


async def wait_for(http: httpx.AsyncClient, path: str, *texts: str, seconds: float = 120) -> str:
    """Return the page when it contains all texts."""
    page = ""
    for _ in range(int(seconds)):
        page = (await http.get(path)).text
        if all(text in page for text in texts):
            return page
        await asyncio.sleep(1)
    raise AssertionError(f"{path} does not contain {texts}: {re.sub(r'<[^>]*>', ' ', page)}")


def read_memory() -> int:
    """Return the bytes that the console's pod uses, as the kubelet counts them."""
    (pod,) = kube.list_("pods", kube.SYSTEM_NAMESPACE, "app.kubernetes.io/name=conveyor-console")
    node = pod["spec"]["nodeName"]
    summary = json.loads(kube.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/stats/summary"))
    found = [each for each in summary["pods"] if each["podRef"]["name"] == pod["metadata"]["name"]]
    return int(found[0]["memory"]["workingSetBytes"]) if found else 0


@pytest.mark.nightly
@pytest.mark.xdist_group("chart")
async def test_a_team_finds_its_faults_in_the_console(
    namespace: str, other_team: str, request: pytest.FixtureRequest
) -> None:
    await asyncio.to_thread(install, "console.enabled=true")
    keys = await asyncio.to_thread(seed, namespace)
    token = await asyncio.to_thread(create_reader, namespace)
    async with (
        forwarded(kube.SYSTEM_NAMESPACE, "service/conveyor-console", 80, ()) as url,
        httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=60) as http,
        sending(namespace, keys) as answered,
    ):
        overview = await wait_for(http, "/", "ModelNotFound", "Unschedulable", f"{namespace}/</span>well")
        rows = re.findall(r'href="/services/[^/]+/(\w+)"', overview)
        assert set(rows[:2]) == {"lost", "huge"}
        assert rows[-1] == "well"
        assert other_team not in overview

        page = f"/services/{namespace}/busy"
        busy = await wait_for(http, page, f"{namespace}/heavy</td>", f"{namespace}/light</td>", "in the gateway&#39;s")
        assert re.search(rf"{namespace}/heavy</td><td data-label=\"Queued\">[4-6]<", busy)
        await asyncio.to_thread(kube.wait_until, "an answer", lambda: answered, 120)
        told = (await http.get("/requests", params={"id": answered[-1]})).text
        assert re.search(
            rf"{namespace}/busy answered {answered[-1]} with 200 in [\d.]+ s: .* generating 200 tokens", told
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
