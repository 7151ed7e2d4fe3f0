"""To zero and back: an idle service has no pod, and its first requests, however many, are held and answered.

While engines start, requests start as many as their batches need, and no more.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from e2e import kube
from e2e.gateway import gateway_url, service_url
from e2e.load import running_load, stream_chat
from e2e.services import quickstart

BODY = {"model": "zero", "max_tokens": 40, "temperature": 0.8}
SELECTOR = "conveyor.dev/inference-service=zero"
PARTS = ("total", "schedule", "image", "model", "load", "warmUp")
SHORT = {"model": "fits", "max_tokens": 4}
CHAT = {**BODY, "messages": [{"role": "user", "content": "What is a list?"}]}


async def test_a_service_goes_to_zero_and_answers_the_first_requests_after_it(
    namespace: str, record_property: Callable[[str, object], None]
) -> None:
    body = quickstart()
    body["metadata"]["name"] = "zero"
    body["spec"]["autoscaling"] = {"minReplicas": 0, "maxReplicas": 2, "idleTimeout": "10s"}
    kube.apply(body, namespace)
    kube.wait_ready("zero", namespace)
    await asyncio.to_thread(kube.wait_until, "no engine", lambda: is_asleep(namespace), 120)
    # Gateways that start while the service is at zero hold its requests as well.
    for what in (("restart",), ("status", "--timeout=170s")):
        deployment = ("deployment/conveyor-gateway", "-n", kube.SYSTEM_NAMESPACE)
        await asyncio.to_thread(kube.kubectl, "rollout", *what, *deployment)
    async with aiohttp.ClientSession() as http:
        for page in ("health", "v1/models"):
            async with http.get(f"{gateway_url()}/{namespace}/zero/{page}") as answer:
                assert answer.status == 200, page
        assert is_asleep(namespace), "nothing of that wakes it"
        first = await stream_chat(http, service_url("zero", namespace), CHAT)
    assert first.error is None
    assert first.first_token_seconds is not None
    record_property("figure", f"from zero to the first token: {first.first_token_seconds:.1f} s")
    start = await asyncio.to_thread(kube.wait_until, "the start's parts", lambda: woken_start(namespace), 60)
    total, *parts = [int(start[part].removesuffix("s")) for part in PARTS]
    assert sum(parts) == total, start
    await asyncio.to_thread(kube.wait_until, "no engine again", lambda: is_asleep(namespace), 120)
    async with running_load(service_url("zero", namespace), BODY, concurrency=8) as load:
        await asyncio.to_thread(kube.wait_until, "answers", lambda: len(load.answers) > 16, 120)
    assert not load.failed, [a.error for a in load.failed]
    assert decisions(namespace)[:2] == ["scaled 0 -> 1: requests are queued"] * 2


@pytest.mark.nightly  # takes minutes; tests/operator and tests/metrics show the same with a real HPA
async def test_requests_at_zero_start_as_many_engines_as_their_batches_need(namespace: str, tmp_path: Path) -> None:
    body = quickstart()
    body["metadata"]["name"] = "fits"
    body["spec"] |= {"batching": {"maxBatchSize": 4}, "queue": {"timeout": "5m"}}
    body["spec"]["autoscaling"] = {"minReplicas": 0, "maxReplicas": 4, "idleTimeout": "5s"}
    kube.apply(body, namespace)
    kube.wait_ready("fits", namespace)
    for requests, engines in ((4, 1), (9, 3)):
        await asyncio.to_thread(kube.wait_until, "no engine", lambda: is_asleep(namespace, "fits"), 240)
        async with watching_replicas(namespace, "fits") as counts, aiohttp.ClientSession() as http:
            chats = [stream_chat(http, service_url("fits", namespace), CHAT | SHORT) for _ in range(requests)]
            answers = await asyncio.gather(*chats)
        assert [answer.error for answer in answers] == [None] * requests
        assert max(counts) == engines, (requests, counts)
    await asyncio.to_thread(kube.wait_until, "no engine", lambda: is_asleep(namespace, "fits"), 240)
    async with watching_replicas(namespace, "fits") as counts:
        await asyncio.to_thread(run_job, service_url("fits", namespace), tmp_path, 4)
    assert max(counts) == 1, ("an offline job", counts)
    events = [event["message"] for event in kube.list_("events", namespace) if event["reason"] == "Scaled"]
    assert any("-> 3: " in event for event in events), events
    assert not any("-> 4: " in event for event in events), events


@contextlib.asynccontextmanager
async def watching_replicas(namespace: str, name: str) -> AsyncIterator[list[int]]:
    """Collect the desired replicas until the block ends."""
    counts = [0]

    async def watch() -> None:
        while True:
            deployment = await asyncio.to_thread(kube.get, "deployment", f"{name}-engine", namespace)
            counts.append(deployment["spec"]["replicas"] if deployment else 0)
            await asyncio.sleep(0.5)

    watcher = asyncio.create_task(watch())
    try:
        yield counts
    finally:
        watcher.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watcher


def run_job(url: str, folder: Path, count: int) -> None:
    """Run an offline job of this many requests to its end."""
    lines = [{"custom_id": str(n), "url": "/v1/chat/completions", "body": CHAT | SHORT} for n in range(count)]
    (folder / "requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ("--url", url.removesuffix("/v1"), "--input", folder / "requests.jsonl", "--output", folder / "results")
    done = subprocess.run(
        [sys.executable, "-m", "conveyor_jobs", *map(str, flags)],
        check=False,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert f"outcome=completed requests={count} completed={count} failed=0" in done.stdout + done.stderr, done


def is_asleep(namespace: str, name: str = "zero") -> bool:
    """Return whether no pod is left and the service is still Ready, with the reason ScaledToZero."""
    ready = kube.condition(kube.get("infsvc", name, namespace), "Ready")
    pods = kube.list_("pods", namespace, f"conveyor.dev/inference-service={name}")
    return (ready.get("status"), ready.get("reason")) == ("True", "ScaledToZero") and not pods


def woken_start(namespace: str) -> dict[str, str] | None:
    """Return the start of the pod that the first request started, once the status has its warm-up time."""
    start: dict[str, str] = kube.get("infsvc", "zero", namespace)["status"].get("lastStart", {})
    pods = [pod["metadata"]["name"] for pod in kube.list_("pods", namespace, SELECTOR)]
    return start if "warmUp" in start and start["podName"] in pods else None


def decisions(namespace: str) -> list[Any]:
    events = kube.list_("events", namespace)
    scaled = [event for event in events if event["reason"] == "Scaled" and " 0 -> 1" in event["message"]]
    return [event["message"] for event in sorted(scaled, key=lambda event: event["eventTime"])]
