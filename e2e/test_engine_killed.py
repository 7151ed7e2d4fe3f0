"""An engine is killed in the middle of streams: its clients get a clear error, the next request works."""

import asyncio

from e2e import kube
from e2e.gateway import service_url
from e2e.load import running_load
from e2e.services import service

# Long enough that no stream ends by itself while the kill is under way.
BODY = {"model": "frail", "max_tokens": 900, "min_tokens": 900, "temperature": 0.8}
KILL = r"""
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    with open(f"/proc/{pid}/cmdline") as file:
        if "conveyor_engine.loop.process" in file.read().split("\0"):
            os.kill(int(pid), signal.SIGKILL)
"""


async def test_an_engine_killed_in_its_streams_gives_clear_errors_and_the_next_request_works(namespace: str) -> None:
    kube.apply(service("frail"), namespace)
    kube.wait_ready("frail", namespace)
    url = service_url("frail", namespace)
    async with running_load(url, BODY, concurrency=3) as load:
        await asyncio.to_thread(kube.wait_until, "three streams run", lambda: streaming(load) >= 3, 60)
        pod = kill_engine(namespace)
        await asyncio.to_thread(kube.wait_until, "all three heard of it", lambda: len(load.failed) >= 3, 60)
        load.body = {**BODY, "max_tokens": 20, "min_tokens": 1}
    errors = [a.error or "" for a in load.failed]
    assert len(errors) == 3, errors
    assert all("error event" in error for error in errors), errors
    # Each client's next request waited at the gateway until the engine was back, and was answered.
    assert len(load.answers) >= 6
    kube.wait_ready("frail", namespace)
    logs = "kubectl logs POD -c engine --previous".replace("POD", pod)
    assert "event=engine_dead" in kube.kubectl(*logs.split()[1:], "-n", namespace)


def streaming(load) -> int:
    return sum(1 for a in load.answers if a.first_token_seconds is not None and a.finished is None)


def kill_engine(namespace: str) -> str:
    """Kill the process that runs the model, as the kernel's OOM killer does. Returns the pod's name."""
    pod: str = kube.list_("pods", namespace, "conveyor.dev/inference-service=frail")[0]["metadata"]["name"]
    kube.kubectl("exec", pod, "-n", namespace, "-c", "engine", "--", "python", "-c", KILL)
    return pod
